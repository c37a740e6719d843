// The context switch between fibers: a dozen instructions, where ucontext would add a system call.
#pragma once

// Saves the callee-saved registers on the current stack, stores its pointer to *from and continues on `to`.
extern "C" void rtk_emu_switch(void** from, void* to);

#if defined(__aarch64__)
__asm__(R"(
    .text
    .globl rtk_emu_switch
    .hidden rtk_emu_switch
    .type rtk_emu_switch, %function
rtk_emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
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
    ldp x19, x20, [sp]
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
)");
constexpr int kFrameWords = 20, kReturnWord = 11;
#elif defined(__x86_64__)
__asm__(R"(
    .text
    .globl rtk_emu_switch
    .hidden rtk_emu_switch
    .type rtk_emu_switch, @function
rtk_emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
constexpr int kFrameWords = 8, kReturnWord = 6;  // one word more: a function starts 8 bytes off a multiple of 16
#else
#error "the emulator's context switch knows aarch64 and x86_64"
#endif
