package kernel

import (
	"fmt"
	"unsafe"

	"plimsoll/dtype"
)

// State is how the fp32 master weights and the moments are held.
type State uint8

const (
	// Split holds the master in two 16-bit streams: the bf16 parameter that
	// the trainer uses, rounded half away from zero, and the low 16 bits.
	// Together they are the fp32 master, bit for bit.
	Split State = iota
	// FP32 holds the whole master, and a 16-bit copy of it for the trainer.
	// With fp32 parameters the trainer uses the master itself.
	FP32
)

func (s State) String() string {
	if s == FP32 {
		return "fp32"
	}
	return "split"
}

// Format fixes the type of every stream.
type Format struct {
	State     State
	Parameter dtype.Type // of the trainer's parameters: BF16, or F16 or F32 with FP32 state
	Gradient  dtype.Type // BF16, F16 or F32
}

// Validate says whether there are kernels for the format.
func (f Format) Validate() error {
	switch {
	case f.State != Split && f.State != FP32:
		return fmt.Errorf("state %d is not known", f.State)
	case f.State == Split && f.Parameter != dtype.BF16:
		return fmt.Errorf("split state keeps bf16 parameters, because they are the upper half of an fp32 number; %v parameters need fp32 state", f.Parameter)
	case f.Parameter != dtype.BF16 && f.Parameter != dtype.F16 && f.Parameter != dtype.F32:
		return fmt.Errorf("parameters are %v; expected bf16, fp16 or fp32", f.Parameter)
	case f.Gradient != dtype.BF16 && f.Gradient != dtype.F16 && f.Gradient != dtype.F32:
		return fmt.Errorf("gradients are %v; expected bf16, fp16 or fp32", f.Gradient)
	}
	return nil
}

// Stream is one of the arrays that an update walks.
type Stream struct {
	Component   string // the name in ledgers, such as "exp_avg"
	Size        int64  // bytes of an element
	Read, Write bool   // by an update
	Why         string
}

// Component names of the streams.
const (
	ComponentParameter = "parameters"
	ComponentMaster    = "master_weights"
	ComponentLow       = "master_weights_low"
	ComponentExpAvg    = "exp_avg"
	ComponentExpAvgSq  = "exp_avg_sq"
	ComponentGradient  = "gradients"
)

// Streams lists the arrays of the format, all with one element a parameter.
func (f Format) Streams() []Stream {
	param := Stream{ComponentParameter, 2, true, true, "bf16, the upper half of the master weights, which the trainer reads"}
	master := Stream{ComponentLow, 2, true, true, "the low 16 bits of the fp32 master weights"}
	if f.State == FP32 {
		param = Stream{ComponentParameter, 2, false, true, f.Parameter.String() + " copy of the master weights, which the trainer reads"}
		master = Stream{ComponentMaster, 4, true, true, "fp32 master weights"}
	}
	if f.Parameter == dtype.F32 {
		master.Why = "fp32 weights, which the trainer reads"
	}
	streams := []Stream{
		param,
		master,
		{ComponentExpAvg, 4, true, true, "fp32 first moment of Adam"},
		{ComponentExpAvgSq, 4, true, true, "fp32 second moment of Adam"},
		{ComponentGradient, f.Gradient.Size(), true, false, f.Gradient.String() + " gradients as the trainer leaves them"},
	}
	if !f.hasParameter() {
		streams = streams[1:]
	}
	return streams
}

// hasParameter says whether there is a stream of parameters beside the master.
func (f Format) hasParameter() bool { return f.Parameter != dtype.F32 }

// ResidentBytes is the number of bytes that all streams hold for a parameter.
func (f Format) ResidentBytes() int64 {
	var sum int64
	for _, s := range f.Streams() {
		sum += s.Size
	}
	return sum
}

// TrafficBytes is the number of bytes that an update moves for a parameter,
// reads and writes added up.
func (f Format) TrafficBytes() int64 {
	var sum int64
	for _, s := range f.Streams() {
		if s.Read {
			sum += s.Size
		}
		if s.Write {
			sum += s.Size
		}
	}
	return sum
}

// Chunk is a stretch of every stream. Low belongs to Split state and Master to
// FP32 state; the other is empty. So is Parameter when parameters are fp32.
type Chunk struct {
	Parameter        []uint16
	Low              []uint16
	Master           []float32
	ExpAvg, ExpAvgSq []float32
	Gradient         Gradient
}

// Gradient is a stretch of gradients of some type.
type Gradient struct {
	Type dtype.Type // BF16, F16 or F32
	Data []byte
}

// Len is the number of elements.
func (g Gradient) Len() int { return len(g.Data) / int(g.Type.Size()) }

// From is the gradient without its first n elements.
func (g Gradient) From(n int) Gradient {
	return Gradient{g.Type, g.Data[n*int(g.Type.Size()):]}
}

// From is the chunk without its first n elements.
func (c Chunk) From(f Format, n int) Chunk {
	rest := Chunk{ExpAvg: c.ExpAvg[n:], ExpAvgSq: c.ExpAvgSq[n:], Gradient: c.Gradient.From(n)}
	if f.hasParameter() {
		rest.Parameter = c.Parameter[n:]
	}
	if f.State == FP32 {
		rest.Master = c.Master[n:]
	} else {
		rest.Low = c.Low[n:]
	}
	return rest
}

// check panics when the streams differ in length, before any assembly could
// walk past the end of one, and returns the length.
func (c *Chunk) check(f Format) int {
	n := len(c.ExpAvg)
	master, param := len(c.Low), n
	if f.State == FP32 {
		master = len(c.Master)
	}
	if !f.hasParameter() {
		param = 0
	}
	if master != n || len(c.Parameter) != param || len(c.ExpAvgSq) != n ||
		c.Gradient.Type != f.Gradient || len(c.Gradient.Data) != n*int(f.Gradient.Size()) {
		panic("kernel: the streams of a chunk differ in length or type")
	}
	return n
}

// pointer is the address of the first byte of a stream.
func pointer[T any](s []T) *T { return unsafe.SliceData(s) }
