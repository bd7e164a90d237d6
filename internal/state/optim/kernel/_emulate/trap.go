// Command trap runs a program on a processor with AVX-512 that lacks VBMI and BF16. It makes the instructions that the
// kernels use of these, each when the processor refuses it:
//
//	go run trap.go PROGRAM ARGUMENTS
//
// Everything else runs on the processor itself, so that tests of kernels take minutes and not hours.
package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	runtime.LockOSThread() // all requests of a tracer must come from one thread
	program := exec.Command(os.Args[1], os.Args[2:]...)
	program.Stdout, program.Stderr = os.Stdout, os.Stderr
	program.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	check(program.Start())
	leader := program.Process.Pid
	var status unix.WaitStatus
	_, err := unix.Wait4(leader, &status, unix.WALL, nil)
	check(err)
	check(unix.PtraceSetOptions(leader, unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_EXITKILL))
	check(unix.PtraceCont(leader, 0))
	made := 0
	for {
		thread, err := unix.Wait4(-1, &status, unix.WALL, nil)
		check(err)
		switch {
		case thread == leader && status.Exited():
			fmt.Fprintf(os.Stderr, "trap: %d instructions were made here\n", made)
			os.Exit(status.ExitStatus())
		case thread == leader && status.Signaled():
			fmt.Fprintln(os.Stderr, "trap: ended by", status.Signal())
			os.Exit(1)
		case !status.Stopped():
			continue // the end of another thread
		}
		signal := status.StopSignal()
		switch {
		case signal == unix.SIGILL && emulate(thread):
			made++
			signal = 0
		case signal == unix.SIGTRAP || signal == unix.SIGSTOP: // a new thread
			signal = 0
		}
		if err := unix.PtraceCont(thread, int(signal)); err != nil && err != unix.ESRCH {
			check(err)
		}
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "trap:", err)
		os.Exit(1)
	}
}

// The state of the vector registers as the kernel keeps it (NT_X86_XSTATE), without compaction.
const (
	extendedState = 0x202
	components    = 512  // the bits of the parts that are not in their initial state
	lowest        = 160  // 128 bits of registers 0 to 15
	middle        = 576  // the next 128 bits
	masks         = 1088 // of 64 bits each
	highest       = 1152 // the upper 256 bits
	others        = 1664 // registers 16 to 31
)

// vectorParts are the components that hold these.
const vectorParts = 1<<1 | 1<<2 | 1<<5 | 1<<6 | 1<<7

// machine is a stopped thread.
type machine struct {
	thread int
	regs   unix.PtraceRegs
	state  []byte
}

func stopped(thread int) *machine {
	m := &machine{thread: thread, state: make([]byte, 16<<10)}
	check(unix.PtraceGetRegs(thread, &m.regs))
	m.state = m.state[:m.transfer(unix.PTRACE_GETREGSET)]
	return m
}

// transfer reads or writes the state and returns its length.
func (m *machine) transfer(request uintptr) uint64 {
	vector := unix.Iovec{Base: &m.state[0], Len: uint64(len(m.state))}
	if _, _, e := unix.Syscall6(unix.SYS_PTRACE, request, uintptr(m.thread), extendedState,
		uintptr(unsafe.Pointer(&vector)), 0, 0); e != 0 {
		check(e)
	}
	return vector.Len
}

// pieces returns the places of a register of 512 bits.
func (m *machine) pieces(register int) [][]byte {
	if register >= 16 {
		return [][]byte{m.state[others+64*(register-16):][:64]}
	}
	return [][]byte{m.state[lowest+16*register:][:16], m.state[middle+16*register:][:16],
		m.state[highest+32*register:][:32]}
}

func (m *machine) get(register int) (x [64]byte) {
	at := 0
	for _, piece := range m.pieces(register) {
		at += copy(x[at:], piece)
	}
	return x
}

func (m *machine) put(register int, x [64]byte) {
	at := 0
	for _, piece := range m.pieces(register) {
		at += copy(piece, x[at:])
	}
	parts := binary.LittleEndian.Uint64(m.state[components:]) | vectorParts
	binary.LittleEndian.PutUint64(m.state[components:], parts)
}

func (m *machine) memory(address uint64, into []byte) {
	_, err := unix.PtracePeekData(m.thread, uintptr(address), into)
	check(err)
}

// general returns the general register of a number.
func (m *machine) general(number int) uint64 {
	r := &m.regs
	return [...]uint64{r.Rax, r.Rcx, r.Rdx, r.Rbx, r.Rsp, r.Rbp, r.Rsi, r.Rdi, r.R8, r.R9, r.R10, r.R11, r.R12, r.R13,
		r.R14, r.R15}[number]
}

// instruction is an instruction with the prefix EVEX.
type instruction struct {
	code                int // the map, the prefix, W, and the opcode
	destination, source int
	last                [64]byte // the operand of the field r/m
	mask                int
	length              uint64
}

// decode reads the instruction at which the thread has stopped.
func (m *machine) decode() (i instruction, ok bool) {
	var b [16]byte
	m.memory(m.regs.Rip, b[:])
	if b[0] != 0x62 {
		return i, false
	}
	bit := func(x byte, n int) int { return int(x >> n & 1) }
	clear := func(x byte, n int) int { return 1 - bit(x, n) }
	i.code = int(b[1]&7)<<16 | int(b[2]&3)<<12 | bit(b[2], 7)<<8 | int(b[4])
	i.mask = int(b[3] & 7)
	i.source = int(^b[2]>>3&15) | clear(b[3], 3)<<4
	i.destination = int(b[5]>>3&7) | clear(b[1], 7)<<3 | clear(b[1], 4)<<4
	mode, rm := b[5]>>6, int(b[5]&7)
	i.length = 6
	if mode == 3 {
		i.last = m.get(rm | clear(b[1], 5)<<3 | clear(b[1], 6)<<4)
		return i, true
	}
	address := uint64(0)
	relative := false
	displacement := func(size int) uint64 {
		at := b[i.length:]
		i.length += uint64(size)
		if size == 1 {
			return uint64(int64(int8(at[0])) * 64)
		}
		return uint64(int64(int32(binary.LittleEndian.Uint32(at))))
	}
	base := rm | clear(b[1], 5)<<3
	none := mode == 0 && rm == 5
	if rm == 4 {
		scale := b[6]
		i.length++
		base = int(scale&7) | clear(b[1], 5)<<3
		none = mode == 0 && scale&7 == 5
		if index := int(scale>>3&7) | clear(b[1], 6)<<3; index != 4 {
			address += m.general(index) << (scale >> 6)
		}
	} else {
		relative = none
	}
	if !none {
		address += m.general(base)
	}
	switch {
	case mode == 1:
		address += displacement(1)
	case mode == 2 || none:
		address += displacement(4)
	}
	if relative {
		address += m.regs.Rip + i.length
	}
	m.memory(address, i.last[:])
	return i, true
}

// The instructions that are made here.
const (
	twoToBF16    = 2<<16 | 3<<12 | 0x72        // VCVTNE2PS2BF16
	oneToBF16    = 2<<16 | 2<<12 | 0x72        // VCVTNEPS2BF16
	permuteBytes = 2<<16 | 1<<12 | 0x8d        // VPERMB
	lookUpBytes  = 2<<16 | 1<<12 | 0x75        // VPERMI2B
	pickFields   = 2<<16 | 1<<12 | 1<<8 | 0x83 // VPMULTISHIFTQB
)

// emulate makes the instruction at which a thread has stopped. It reports whether it knows it.
func emulate(thread int) bool {
	m := stopped(thread)
	i, ok := m.decode()
	if !ok {
		return false
	}
	before, first := m.get(i.destination), m.get(i.source)
	var result [64]byte
	switch i.code {
	case twoToBF16:
		roundToBF16(result[:32], i.last)
		roundToBF16(result[32:], first)
	case oneToBF16:
		roundToBF16(result[:32], i.last)
	case permuteBytes:
		for n := range result {
			result[n] = i.last[first[n]&63]
		}
	case lookUpBytes:
		for n, code := range before {
			result[n] = first[code&63]
			if code&64 != 0 {
				result[n] = i.last[code&63]
			}
		}
	case pickFields:
		for n := range result {
			word := binary.LittleEndian.Uint64(i.last[n&^7:])
			result[n] = byte(word>>(first[n]&63) | word<<(64-first[n]&63))
		}
	default:
		return false
	}
	if i.mask != 0 { // of bytes
		mask := binary.LittleEndian.Uint64(m.state[masks+8*i.mask:])
		for n := range result {
			if mask>>n&1 == 0 {
				result[n] = before[n]
			}
		}
	}
	m.put(i.destination, result)
	m.regs.Rip += i.length
	check(unix.PtraceSetRegs(thread, &m.regs))
	m.transfer(unix.PTRACE_SETREGSET)
	return true
}

// roundToBF16 rounds 16 numbers to nearest even. Denormal numbers count as zeros, and a NaN stays one, with its sign
// and the upper part of its payload.
func roundToBF16(to []byte, x [64]byte) {
	for n := range 16 {
		bits := binary.LittleEndian.Uint32(x[4*n:])
		number := math.Float32frombits(bits)
		var rounded uint32
		switch {
		case number != number:
			rounded = bits>>16 | 0x40
		case bits&0x7f800000 == 0:
			rounded = bits >> 16 & 0x8000
		default:
			rounded = (bits + 0x7fff + bits>>16&1) >> 16
		}
		binary.LittleEndian.PutUint16(to[2*n:], uint16(rounded))
	}
}
