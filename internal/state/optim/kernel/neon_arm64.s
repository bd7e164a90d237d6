//go:build !purego

#include "textflag.h"

// The instructions that Go's assembler does not know, with operands in its order:
// the result comes last.

#define FADD(m, n, d)   WORD $(0x4e20d400 | (m)<<16 | (n)<<5 | (d)) // FADD   Vd.4S, Vn.4S, Vm.4S
#define FSUB(m, n, d)   WORD $(0x4ea0d400 | (m)<<16 | (n)<<5 | (d)) // FSUB   Vd.4S, Vn.4S, Vm.4S
#define FMUL(m, n, d)   WORD $(0x6e20dc00 | (m)<<16 | (n)<<5 | (d)) // FMUL   Vd.4S, Vn.4S, Vm.4S
#define FDIV(m, n, d)   WORD $(0x6e20fc00 | (m)<<16 | (n)<<5 | (d)) // FDIV   Vd.4S, Vn.4S, Vm.4S
#define FSQRT(n, d)     WORD $(0x6ea1f800 | (n)<<5 | (d))           // FSQRT  Vd.4S, Vn.4S
#define FABS(n, d)      WORD $(0x4ea0f800 | (n)<<5 | (d))           // FABS   Vd.4S, Vn.4S
#define FCMEQ(m, n, d)  WORD $(0x4e20e400 | (m)<<16 | (n)<<5 | (d)) // FCMEQ  Vd.4S, Vn.4S, Vm.4S
#define FCMEQ0(n, d)    WORD $(0x4ea0d800 | (n)<<5 | (d))           // FCMEQ  Vd.4S, Vn.4S, #0.0
#define FCMGE(m, n, d)  WORD $(0x6e20e400 | (m)<<16 | (n)<<5 | (d)) // FCMGE  Vd.4S, Vn.4S, Vm.4S
#define FCVTL(n, d)     WORD $(0x0e217800 | (n)<<5 | (d))           // FCVTL  Vd.4S, Vn.4H
#define FCVTL2(n, d)    WORD $(0x4e217800 | (n)<<5 | (d))           // FCVTL2 Vd.4S, Vn.8H
#define FCVTN(n, d)     WORD $(0x0e216800 | (n)<<5 | (d))           // FCVTN  Vd.4H, Vn.4S
#define FCVTN2(n, d)    WORD $(0x4e216800 | (n)<<5 | (d))           // FCVTN2 Vd.8H, Vn.4S
#define RSHRN(n, d)     WORD $(0x0f108c00 | (n)<<5 | (d))           // RSHRN  Vd.4H, Vn.4S, #16
#define RSHRN2(n, d)    WORD $(0x4f108c00 | (n)<<5 | (d))           // RSHRN2 Vd.8H, Vn.4S, #16
#define ADDHN(m, n, d)  WORD $(0x0e604000 | (m)<<16 | (n)<<5 | (d)) // ADDHN  Vd.4H, Vn.4S, Vm.4S
#define ADDHN2(m, n, d) WORD $(0x4e604000 | (m)<<16 | (n)<<5 | (d)) // ADDHN2 Vd.8H, Vn.4S, Vm.4S
#define MUL(m, n, d)    WORD $(0x4ea09c00 | (m)<<16 | (n)<<5 | (d)) // MUL    Vd.4S, Vn.4S, Vm.4S
#define USHL(m, n, d)   WORD $(0x6ea04400 | (m)<<16 | (n)<<5 | (d)) // USHL   Vd.4S, Vn.4S, Vm.4S
#define SMAX(m, n, d)   WORD $(0x4ea06400 | (m)<<16 | (n)<<5 | (d)) // SMAX   Vd.4S, Vn.4S, Vm.4S
#define UMINV(n, d)     WORD $(0x6eb1a800 | (n)<<5 | (d))           // UMINV  Sd, Vn.4S
#define UMAXV(n, d)     WORD $(0x6eb0a800 | (n)<<5 | (d))           // UMAXV  Sd, Vn.4S

// Operations have their result in R0 and the groups that are left in R2. A group is in
// V0 to V3, and that of a second operand in V4 to V7.

#define ALL(constant, register) \
	MOVD constant, R7; \
	VDUP R7, register.S4

// Arithmetic has its results in V16 to V19. It leaves for end when one is tiny: for
// that, twice the bits must be at least 1 and below 0x2000000.

#define BEGIN_ARITHMETIC \
	VMOVI $255, V31.B16; \
	MOVD  $0x1ffffff, R5; \
	LSR   $4, R1; \
	MOVD  R1, R2; \
	CBZ   R2, end

#define UNLESS_TINY \
	VSHL  $1, V16.S4, V20.S4; \
	VSHL  $1, V17.S4, V21.S4; \
	VSHL  $1, V18.S4, V22.S4; \
	VSHL  $1, V19.S4, V23.S4; \
	VADD  V31.S4, V20.S4, V20.S4; \
	VADD  V31.S4, V21.S4, V21.S4; \
	VADD  V31.S4, V22.S4, V22.S4; \
	VADD  V31.S4, V23.S4, V23.S4; \
	VUMIN V21.S4, V20.S4, V20.S4; \
	VUMIN V23.S4, V22.S4, V22.S4; \
	VUMIN V22.S4, V20.S4, V20.S4; \
	UMINV(20, 20); \
	VMOV  V20.S[0], R6; \
	CMPW  R5, R6; \
	BLO   end

#define NEXT \
	UNLESS_TINY; \
	VST1.P [V16.S4, V17.S4, V18.S4, V19.S4], 64(R0); \
	SUB    $1, R2; \
	CBNZ   R2, loop

#define END_ARITHMETIC \
	SUB R2, R1; \
	LSL $4, R1

// func mulNEON(to *float32, n int, a float32, b *float32) (done int)
TEXT ·mulNEON(SB), NOSPLIT, $0-40
	MOVD  to+0(FP), R0
	MOVD  n+8(FP), R1
	FMOVS a+16(FP), F30
	VDUP  V30.S[0], V30.S4
	MOVD  b+24(FP), R3
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	FMUL(30, 0, 16)
	FMUL(30, 1, 17)
	FMUL(30, 2, 18)
	FMUL(30, 3, 19)
	NEXT

end:
	END_ARITHMETIC
	MOVD R1, done+32(FP)
	RET

// func squareNEON(to *float32, n int, a *float32) (done int)
TEXT ·squareNEON(SB), NOSPLIT, $0-32
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD a+16(FP), R3
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	FMUL(0, 0, 16)
	FMUL(1, 1, 17)
	FMUL(2, 2, 18)
	FMUL(3, 3, 19)
	NEXT

end:
	END_ARITHMETIC
	MOVD R1, done+24(FP)
	RET

// func addNEON(to *float32, n int, a, b *float32) (done int)
TEXT ·addNEON(SB), NOSPLIT, $0-40
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD a+16(FP), R3
	MOVD b+24(FP), R4
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R4), [V4.S4, V5.S4, V6.S4, V7.S4]
	FADD(4, 0, 16)
	FADD(5, 1, 17)
	FADD(6, 2, 18)
	FADD(7, 3, 19)
	NEXT

end:
	END_ARITHMETIC
	MOVD R1, done+32(FP)
	RET

// func divNEON(to *float32, n int, a, b *float32) (done int)
TEXT ·divNEON(SB), NOSPLIT, $0-40
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD a+16(FP), R3
	MOVD b+24(FP), R4
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R4), [V4.S4, V5.S4, V6.S4, V7.S4]
	FDIV(4, 0, 16)
	FDIV(5, 1, 17)
	FDIV(6, 2, 18)
	FDIV(7, 3, 19)
	NEXT

end:
	END_ARITHMETIC
	MOVD R1, done+32(FP)
	RET

// func fmaNEON(to *float32, n int, a float32, b, c *float32) (done int)
TEXT ·fmaNEON(SB), NOSPLIT, $0-48
	MOVD  to+0(FP), R0
	MOVD  n+8(FP), R1
	FMOVS a+16(FP), F30
	VDUP  V30.S[0], V30.S4
	MOVD  b+24(FP), R3
	MOVD  c+32(FP), R4
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R4), [V16.S4, V17.S4, V18.S4, V19.S4]
	VFMLA  V30.S4, V0.S4, V16.S4
	VFMLA  V30.S4, V1.S4, V17.S4
	VFMLA  V30.S4, V2.S4, V18.S4
	VFMLA  V30.S4, V3.S4, V19.S4
	NEXT

end:
	END_ARITHMETIC
	MOVD R1, done+40(FP)
	RET

// func fmaPlusNEON(to *float32, n int, a float32, b *float32, c float32) (done int)
TEXT ·fmaPlusNEON(SB), NOSPLIT, $0-48
	MOVD  to+0(FP), R0
	MOVD  n+8(FP), R1
	FMOVS a+16(FP), F30
	VDUP  V30.S[0], V30.S4
	MOVD  b+24(FP), R3
	FMOVS c+32(FP), F29
	VDUP  V29.S[0], V29.S4
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	VMOV   V29.B16, V16.B16
	VMOV   V29.B16, V17.B16
	VMOV   V29.B16, V18.B16
	VMOV   V29.B16, V19.B16
	VFMLA  V30.S4, V0.S4, V16.S4
	VFMLA  V30.S4, V1.S4, V17.S4
	VFMLA  V30.S4, V2.S4, V18.S4
	VFMLA  V30.S4, V3.S4, V19.S4
	NEXT

end:
	END_ARITHMETIC
	MOVD R1, done+40(FP)
	RET

// func fmaSquareNEON(to *float32, n int, a, c *float32) (done int)
TEXT ·fmaSquareNEON(SB), NOSPLIT, $0-40
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD a+16(FP), R3
	MOVD c+24(FP), R4
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R4), [V16.S4, V17.S4, V18.S4, V19.S4]
	VFMLA  V0.S4, V0.S4, V16.S4
	VFMLA  V1.S4, V1.S4, V17.S4
	VFMLA  V2.S4, V2.S4, V18.S4
	VFMLA  V3.S4, V3.S4, V19.S4
	NEXT

end:
	END_ARITHMETIC
	MOVD R1, done+32(FP)
	RET

// Sums stay in V24 to V27; a group is added to a copy of them first.

// func addSquaresNEON(sums *[abi.Group]float32, n int, run *float32) (done int)
TEXT ·addSquaresNEON(SB), NOSPLIT, $0-32
	MOVD sums+0(FP), R0
	MOVD n+8(FP), R1
	MOVD run+16(FP), R3
	VLD1 (R0), [V24.S4, V25.S4, V26.S4, V27.S4]
	BEGIN_ARITHMETIC

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	VMOV   V24.B16, V16.B16
	VMOV   V25.B16, V17.B16
	VMOV   V26.B16, V18.B16
	VMOV   V27.B16, V19.B16
	VFMLA  V0.S4, V0.S4, V16.S4
	VFMLA  V1.S4, V1.S4, V17.S4
	VFMLA  V2.S4, V2.S4, V18.S4
	VFMLA  V3.S4, V3.S4, V19.S4
	UNLESS_TINY
	VMOV   V16.B16, V24.B16
	VMOV   V17.B16, V25.B16
	VMOV   V18.B16, V26.B16
	VMOV   V19.B16, V27.B16
	SUB    $1, R2
	CBNZ   R2, loop

end:
	VST1 [V24.S4, V25.S4, V26.S4, V27.S4], (R0)
	END_ARITHMETIC
	MOVD R1, done+24(FP)
	RET

// The operations below need no such care, and go through all groups.

#define BEGIN \
	LSR $4, R1, R2; \
	CBZ R2, end

#define AGAIN \
	SUB  $1, R2; \
	CBNZ R2, loop

// func sqrtNEON(to *float32, n int, a *float32)
TEXT ·sqrtNEON(SB), NOSPLIT, $0-24
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD a+16(FP), R3
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	FSQRT(0, 0)
	FSQRT(1, 1)
	FSQRT(2, 2)
	FSQRT(3, 3)
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R0)
	AGAIN

end:
	RET

// The sign of x, with the magnitude in V30. V28 are sign bits, and V31 zeros.
#define WITH_SIGN(x, number, result) \
	VAND V28.B16, x.B16, result.B16; \
	VEOR V30.B16, result.B16, result.B16; \
	FCMEQ0(number, 20); \
	VBIT V20.B16, V31.B16, result.B16; \
	FCMEQ(number, number, 21); \
	VBIF V21.B16, x.B16, result.B16

// func withSignNEON(to *float32, n int, magnitude float32, a *float32)
TEXT ·withSignNEON(SB), NOSPLIT, $0-32
	MOVD  to+0(FP), R0
	MOVD  n+8(FP), R1
	FMOVS magnitude+16(FP), F30
	VDUP  V30.S[0], V30.S4
	MOVD  a+24(FP), R3
	VEOR  V31.B16, V31.B16, V31.B16
	ALL($0x80000000, V28)
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	WITH_SIGN(V0, 0, V16)
	WITH_SIGN(V1, 1, V17)
	WITH_SIGN(V2, 2, V18)
	WITH_SIGN(V3, 3, V19)
	VST1.P [V16.S4, V17.S4, V18.S4, V19.S4], 64(R0)
	AGAIN

end:
	RET

// What is read has denormals, of which the sign stays. V30 are exponent bits, and
// V31 sign bits.

#define BEGIN_FLUSHING \
	ALL($0x7f800000, V30); \
	ALL($0x80000000, V31)

#define FLUSH(x, mask) \
	VCMTST V30.S4, x.S4, mask.S4; \
	VORR   V31.B16, mask.B16, mask.B16; \
	VAND   mask.B16, x.B16, x.B16

#define FLUSH_ALL \
	FLUSH(V0, V20); \
	FLUSH(V1, V21); \
	FLUSH(V2, V22); \
	FLUSH(V3, V23)

// func loadBF16NEON(to *float32, n int, from *byte)
TEXT ·loadBF16NEON(SB), NOSPLIT, $0-24
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD from+16(FP), R3
	VEOR V29.B16, V29.B16, V29.B16
	BEGIN_FLUSHING
	BEGIN

loop:
	VLD1.P 32(R3), [V16.H8, V17.H8]
	VZIP1  V16.H8, V29.H8, V0.H8
	VZIP2  V16.H8, V29.H8, V1.H8
	VZIP1  V17.H8, V29.H8, V2.H8
	VZIP2  V17.H8, V29.H8, V3.H8
	FLUSH_ALL
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R0)
	AGAIN

end:
	RET

// No fp16 number is denormal in fp32.

// func loadFP16NEON(to *float32, n int, from *byte)
TEXT ·loadFP16NEON(SB), NOSPLIT, $0-24
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD from+16(FP), R3
	BEGIN

loop:
	VLD1.P 32(R3), [V16.H8, V17.H8]
	FCVTL(16, 0)
	FCVTL2(16, 1)
	FCVTL(17, 2)
	FCVTL2(17, 3)
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R0)
	AGAIN

end:
	RET

// func loadFP32NEON(to *float32, n int, from *byte)
TEXT ·loadFP32NEON(SB), NOSPLIT, $0-24
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD from+16(FP), R3
	BEGIN_FLUSHING
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	FLUSH_ALL
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R0)
	AGAIN

end:
	RET

// The low half has a sign: where it is negative, the upper half is one less.

// func mergeNEON(to *float32, n int, parameter, low *uint16)
TEXT ·mergeNEON(SB), NOSPLIT, $0-32
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD parameter+16(FP), R3
	MOVD low+24(FP), R4
	BEGIN_FLUSHING
	BEGIN

loop:
	VLD1.P 32(R3), [V16.H8, V17.H8]
	VLD1.P 32(R4), [V18.H8, V19.H8]
	VUSHR  $15, V18.H8, V20.H8
	VUSHR  $15, V19.H8, V21.H8
	VSUB   V20.H8, V16.H8, V16.H8
	VSUB   V21.H8, V17.H8, V17.H8
	VZIP1  V16.H8, V18.H8, V0.H8
	VZIP2  V16.H8, V18.H8, V1.H8
	VZIP1  V17.H8, V19.H8, V2.H8
	VZIP2  V17.H8, V19.H8, V3.H8
	FLUSH_ALL
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R0)
	AGAIN

end:
	RET

// x becomes what a half less of the last place is to be added to: x and the bit
// above the half, so that ties go to even. V29 are ones.
#define EVEN(x, sum) \
	VUSHR $16, x.S4, sum.S4; \
	VAND  V29.B16, sum.B16, sum.B16; \
	VADD  x.S4, sum.S4, sum.S4

// func storeBF16NEON(to *byte, n int, from *float32)
TEXT ·storeBF16NEON(SB), NOSPLIT, $0-24
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD from+16(FP), R3
	ALL($1, V29)
	ALL($0x7fff, V30)
	ALL($0x7fc07fc0, V31)
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	EVEN(V0, V20)
	EVEN(V1, V21)
	EVEN(V2, V22)
	EVEN(V3, V23)
	ADDHN(30, 20, 16)
	ADDHN2(30, 21, 16)
	ADDHN(30, 22, 17)
	ADDHN2(30, 23, 17)

	// NaN
	FCMEQ(0, 0, 20)
	FCMEQ(1, 1, 21)
	FCMEQ(2, 2, 22)
	FCMEQ(3, 3, 23)
	VUZP1  V21.H8, V20.H8, V20.H8
	VUZP1  V23.H8, V22.H8, V22.H8
	VBIF   V20.B16, V31.B16, V16.B16
	VBIF   V22.B16, V31.B16, V17.B16
	VST1.P [V16.H8, V17.H8], 32(R0)
	AGAIN

end:
	RET

// func storeFP16NEON(to *byte, n int, from *float32)
TEXT ·storeFP16NEON(SB), NOSPLIT, $0-24
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD from+16(FP), R3
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	FCVTN(0, 16)
	FCVTN2(1, 16)
	FCVTN(2, 17)
	FCVTN2(3, 17)
	VST1.P [V16.H8, V17.H8], 32(R0)
	AGAIN

end:
	RET

// func awayNEON(to *uint16, n int, from *float32)
TEXT ·awayNEON(SB), NOSPLIT, $0-24
	MOVD to+0(FP), R0
	MOVD n+8(FP), R1
	MOVD from+16(FP), R3
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	RSHRN(0, 16)
	RSHRN2(1, 16)
	RSHRN(2, 17)
	RSHRN2(3, 17)
	VST1.P [V16.H8, V17.H8], 32(R0)
	AGAIN

end:
	RET

// func separateNEON(parameter *uint16, n int, low *uint16, from *float32)
TEXT ·separateNEON(SB), NOSPLIT, $0-32
	MOVD parameter+0(FP), R0
	MOVD n+8(FP), R1
	MOVD low+16(FP), R4
	MOVD from+24(FP), R3
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	RSHRN(0, 16)
	RSHRN2(1, 16)
	RSHRN(2, 17)
	RSHRN2(3, 17)
	VUZP1  V1.H8, V0.H8, V18.H8
	VUZP1  V3.H8, V2.H8, V19.H8
	VST1.P [V16.H8, V17.H8], 32(R0)
	VST1.P [V18.H8, V19.H8], 32(R4)
	AGAIN

end:
	RET

// Dithers of a group are in V4 to V7, and V19 is what they grow by to the next. This
// makes them from the first, in R7, and the stride, in R8.
#define BEGIN_DITHERS \
	VMOV R7, V4.S[0]; \
	ADDW R8, R7; \
	VMOV R7, V4.S[1]; \
	ADDW R8, R7; \
	VMOV R7, V4.S[2]; \
	ADDW R8, R7; \
	VMOV R7, V4.S[3]; \
	VDUP R8, V19.S4; \
	VSHL $2, V19.S4, V19.S4; \
	VADD V19.S4, V4.S4, V5.S4; \
	VADD V19.S4, V5.S4, V6.S4; \
	VADD V19.S4, V6.S4, V7.S4; \
	VSHL $2, V19.S4, V19.S4

#define NEXT_DITHERS \
	VADD V19.S4, V4.S4, V4.S4; \
	VADD V19.S4, V5.S4, V5.S4; \
	VADD V19.S4, V6.S4, V6.S4; \
	VADD V19.S4, V7.S4, V7.S4

// func ditheredNEON(to *uint16, n int, from *float32, dither uint32)
TEXT ·ditheredNEON(SB), NOSPLIT, $0-28
	MOVD  to+0(FP), R0
	MOVD  n+8(FP), R1
	MOVD  from+16(FP), R3
	MOVWU dither+24(FP), R7
	MOVD  $0x9e3779b9, R8   // abi.DitherStep
	BEGIN_DITHERS
	BEGIN

loop:
	VLD1.P 64(R3), [V0.S4, V1.S4, V2.S4, V3.S4]
	MUL(4, 4, 20)
	MUL(5, 5, 21)
	MUL(6, 6, 22)
	MUL(7, 7, 23)
	VUSHR  $16, V20.S4, V20.S4
	VUSHR  $16, V21.S4, V21.S4
	VUSHR  $16, V22.S4, V22.S4
	VUSHR  $16, V23.S4, V23.S4
	ADDHN(20, 0, 16)
	ADDHN2(21, 1, 16)
	ADDHN(22, 2, 17)
	ADDHN2(23, 3, 17)
	NEXT_DITHERS
	VST1.P [V16.H8, V17.H8], 32(R0)
	AGAIN

end:
	RET

// The code of int8 moments follows the formulas of the package's documentation.

// An octet of codes in each of 16 lanes becomes a number of four registers.
#define WIDEN(codes, a, b, c, d) \
	VUXTL  codes.B8, a.H8; \
	VUXTL2 codes.B16, c.H8; \
	VUXTL2 a.H8, b.S4; \
	VUXTL  a.H4, a.S4; \
	VUXTL2 c.H8, d.S4; \
	VUXTL  c.H4, c.S4

// q becomes m, and k becomes s. V27 are sign bits, V28 is shift, V29 base, V30 1/16,
// and V31 exponent bits.
#define DECODE(q, nq, k, nk) \
	VCMTST k.S4, k.S4, V20.S4; \
	USHL(28, nk, 21); \
	VADD   V29.S4, V21.S4, V21.S4; \
	VSHL   $25, q.S4, V22.S4; \
	VUSHR  $6, V22.S4, V22.S4; \
	VADD   V30.S4, V22.S4, V22.S4; \
	FSUB(30, 22, 22); \
	VAND   V31.B16, V21.B16, V23.B16; \
	FMUL(23, 22, 22); \
	VSHL   $24, q.S4, q.S4; \
	VAND   V27.B16, q.B16, q.B16; \
	VORR   V22.B16, q.B16, q.B16; \
	VAND   V20.B16, q.B16, q.B16; \
	VAND   V20.B16, V21.B16, k.B16

// func loadBlockNEON(firsts *float32, n int, roots *float32, first, second *byte, base, shift uint32)
TEXT ·loadBlockNEON(SB), NOSPLIT, $0-48
	MOVD  firsts+0(FP), R0
	MOVD  n+8(FP), R1
	MOVD  roots+16(FP), R3
	MOVD  first+24(FP), R4
	MOVD  second+32(FP), R5
	MOVWU base+40(FP), R6
	VDUP  R6, V29.S4
	MOVWU shift+44(FP), R6
	VDUP  R6, V28.S4
	ALL($0x80000000, V27)
	ALL($0x3d800000, V30)
	ALL($0x7f800000, V31)
	BEGIN

loop:
	VLD1.P 16(R4), [V16.B16]
	VLD1.P 16(R5), [V17.B16]
	WIDEN(V16, V0, V1, V2, V3)
	WIDEN(V17, V4, V5, V6, V7)
	DECODE(V0, 0, V4, 4)
	DECODE(V1, 1, V5, 5)
	DECODE(V2, 2, V6, 6)
	DECODE(V3, 3, V7, 7)
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R0)
	VST1.P [V4.S4, V5.S4, V6.S4, V7.S4], 64(R3)
	AGAIN

end:
	RET

// s becomes what can be held: no more than V30, which is 2^63, and no NaN.
#define BOUND(s, number) \
	FCMGE(number, 30, 20); \
	VBIF  V20.B16, V30.B16, s.B16; \
	VADD  V31.S4, s.S4, V20.S4; \
	VUMIN V20.S4, V28.S4, V28.S4; \
	VUMAX s.S4, V29.S4, V29.S4

// func boundNEON(roots *float32, n int) (least, largest uint32)
TEXT ·boundNEON(SB), NOSPLIT, $0-24
	MOVD  roots+0(FP), R0
	MOVD  n+8(FP), R1
	VMOVI $255, V28.B16
	VEOR  V29.B16, V29.B16, V29.B16
	VMOVI $255, V31.B16
	ALL($0x5f000000, V30)
	BEGIN

loop:
	VLD1   (R0), [V0.S4, V1.S4, V2.S4, V3.S4]
	BOUND(V0, 0)
	BOUND(V1, 1)
	BOUND(V2, 2)
	BOUND(V3, 3)
	VST1.P [V0.S4, V1.S4, V2.S4, V3.S4], 64(R0)
	AGAIN

end:
	UMINV(28, 28)
	VMOV V28.S[0], R6
	MOVW R6, least+16(FP)
	UMAXV(29, 29)
	VMOV V29.S[0], R6
	MOVW R6, largest+20(FP)
	RET

// m becomes q, and s becomes k. V16 is what the random number of m is more than that
// of s, and has 19 bits in V22. V20 are ones at the place of q's sign, V21 is the
// most without it, V24 1/16, V25 the exponents of a number and of its inverse, added
// up, V26 exponent bits, V27 a unit of k, V28 shift - 32, V29 -shift, V30 shift and
// V31 base.
#define ENCODE(m, nm, s, h, nh) \
	VSUB   V31.S4, s.S4, V12.S4; \
	SMAX(27, 12, 12); \
	USHL(28, nh, 13); \
	VADD   V13.S4, V12.S4, V12.S4; \
	USHL(29, 12, 12); \
	USHL(30, 12, 13); \
	VADD   V31.S4, V13.S4, V13.S4; \
	VAND   V26.B16, V13.B16, V13.B16; \
	VSUB   V13.S4, V25.S4, V13.S4; \
	FABS(nm, 15); \
	FMUL(13, 15, 15); \
	FADD(24, 15, 15); \
	VSUB   V24.S4, V15.S4, V15.S4; \
	VADD   V16.S4, h.S4, V14.S4; \
	VAND   V22.B16, V14.B16, V14.B16; \
	VADD   V14.S4, V15.S4, V15.S4; \
	VUSHR  $19, V15.S4, V15.S4; \
	VUMIN  V21.S4, V15.S4, V15.S4; \
	VUSHR  $24, m.S4, m.S4; \
	VAND   V20.B16, m.B16, m.B16; \
	VORR   V15.B16, m.B16, m.B16; \
	VCMTST s.S4, s.S4, V13.S4; \
	VAND   V13.B16, m.B16, m.B16; \
	VAND   V13.B16, V12.B16, s.B16

// Numbers in four registers become octets in one.
#define NARROW(a, b, c, d) \
	VUZP1 b.H8, a.H8, a.H8; \
	VUZP1 d.H8, c.H8, c.H8; \
	VUZP1 c.B16, a.B16, a.B16

// func codesNEON(first *byte, n int, second *byte, firsts, roots *float32, base, shift, added, apart, stride uint32)
TEXT ·codesNEON(SB), NOSPLIT, $0-60
	MOVD  first+0(FP), R0
	MOVD  n+8(FP), R1
	MOVD  second+16(FP), R3
	MOVD  firsts+24(FP), R4
	MOVD  roots+32(FP), R5
	MOVWU base+40(FP), R6
	VDUP  R6, V31.S4
	MOVWU shift+44(FP), R6
	VDUP  R6, V30.S4
	NEG   R6, R7
	VDUP  R7, V29.S4
	SUB   $32, R6, R7
	VDUP  R7, V28.S4
	MOVD  $1, R7
	LSL   R6, R7
	VDUP  R7, V27.S4
	ALL($0x7f800000, V26)
	ALL($0x7f000000, V25)
	ALL($0x3d800000, V24)
	ALL($0x7ffff, V22)
	ALL($127, V21)
	ALL($128, V20)
	MOVWU apart+52(FP), R7
	VDUP  R7, V16.S4
	MOVWU added+48(FP), R7
	MOVWU stride+56(FP), R8
	BEGIN_DITHERS
	BEGIN

loop:
	VLD1.P 64(R4), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1.P 64(R5), [V8.S4, V9.S4, V10.S4, V11.S4]
	ENCODE(V0, 0, V8, V4, 4)
	ENCODE(V1, 1, V9, V5, 5)
	ENCODE(V2, 2, V10, V6, 6)
	ENCODE(V3, 3, V11, V7, 7)
	NEXT_DITHERS
	NARROW(V0, V1, V2, V3)
	NARROW(V8, V9, V10, V11)
	VST1.P [V0.B16], 16(R0)
	VST1.P [V8.B16], 16(R3)
	AGAIN

end:
	RET
