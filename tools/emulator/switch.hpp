// SPDX-License-Identifier: Apache-2.0
// How a fiber stops and another goes on. Included by launch.cpp alone.
#pragma once
#include <ucontext.h>

#include "runtime.hpp"

namespace emu {

// ---- Context switch ----
// Saves the callee-saved registers on the old stack, and takes the new one's.
#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
static void* first_stack_pointer(u8* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 16);
  *--top = nullptr;  // the return address of `entry`, which does not return
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}
#elif defined(__aarch64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, %function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch, .-emu_switch
)");
static void* first_stack_pointer(u8* stack, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(stack + kStackBytes - 160);
  std::memset(frame, 0, 160);
  frame[11] = reinterpret_cast<void*>(entry);  // x30
  return frame;
}
#else  // any other machine: ucontext, slower
static void emu_switch(void** save, void* load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}
static void* first_stack_pointer(u8* stack, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>(stack);
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

}  // namespace emu
