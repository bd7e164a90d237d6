package kernel

import (
	"fmt"
	"unsafe"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/optim/kernel/abi"
)

// Algorithm is an optimizer's update rule.
type Algorithm = abi.Algorithm

// The algorithms.
const (
	Adam    = abi.Adam
	Lion    = abi.Lion
	Adagrad = abi.Adagrad
	SGD     = abi.SGD
)

// State is the representation of the fp32 master weights.
type State = abi.State

// The states.
const (
	Split   = abi.Split
	FP32    = abi.FP32
	Split24 = abi.Split24
)

// MomentType is the representation of moments.
type MomentType = abi.MomentType

// The types of moments.
const (
	MomentsFP32 = abi.MomentsFP32
	MomentsBF16 = abi.MomentsBF16
	MomentsInt8 = abi.MomentsInt8
)

// Block is the number of elements whose int8 moments share a header.
const Block = abi.Block

// Format fixes the algorithm and the type of every stream.
type Format struct {
	Algorithm Algorithm
	State     State
	Moments   MomentType
	Parameter dtype.Type // of the trainer's parameters: BF16, or F16 or F32 with FP32 state
	Gradient  dtype.Type // BF16, F16 or F32
}

func (f Format) String() string {
	return fmt.Sprintf("%v/state=%v/moments=%v/parameter=%v/gradient=%v",
		f.Algorithm, f.State, f.Moments, f.Parameter, f.Gradient)
}

// Validate refuses formats that have no kernels.
func (f Format) Validate() error {
	switch {
	case f.Algorithm >= abi.Algorithms || f.State >= abi.States || f.Moments >= abi.MomentTypes:
		return fmt.Errorf("algorithm %d, state %d or moments %d are not known", f.Algorithm, f.State, f.Moments)
	case !f.Moments.Suits(f.Algorithm):
		return fmt.Errorf("%v moments are made for Adam, whose first moment is small where its second is; "+
			"%v has none such", f.Moments, f.Algorithm)
	case f.State != FP32 && f.Parameter != dtype.BF16:
		return fmt.Errorf("%v state keeps bf16 parameters, because they are the upper half of an fp32 number; "+
			"%v parameters need fp32 state", f.State, f.Parameter)
	case f.Parameter != dtype.BF16 && f.Parameter != dtype.F16 && f.Parameter != dtype.F32:
		return fmt.Errorf("parameters are %v; expected bf16, fp16 or fp32", f.Parameter)
	case f.Gradient != dtype.BF16 && f.Gradient != dtype.F16 && f.Gradient != dtype.F32:
		return fmt.Errorf("gradients are %v; expected bf16, fp16 or fp32", f.Gradient)
	}
	return nil
}

// Role is what a stream is for.
type Role uint8

// The roles of streams.
const (
	ParameterRole Role = iota
	LowRole
	MasterRole
	FirstMomentRole
	SecondMomentRole
	HeaderRole
	GradientRole
)

// OfMoments reports whether a stream with this role holds moments. Sections of a shard may differ in their type.
func (r Role) OfMoments() bool {
	return r == FirstMomentRole || r == SecondMomentRole || r == HeaderRole
}

// Stream is one of the arrays that an update walks.
type Stream struct {
	Role        Role
	Component   ledger.Component
	Type        dtype.Type // of its elements
	Read, Write bool       // by an update
	Why         string
	Shared      int64 // how many parameters share an element; 0 for one each
}

// Elements returns the number of elements of the stream for a number of parameters.
func (s Stream) Elements(parameters int64) int64 {
	each := max(s.Shared, 1)
	return parameters/each + (parameters%each+each-1)/each
}

// Bytes returns the size of the stream for a number of parameters.
func (s Stream) Bytes(parameters int64) int64 { return s.Type.Size() * s.Elements(parameters) }

// moments are the moments of each algorithm, with PyTorch's names.
var moments = [abi.Algorithms][]struct {
	component ledger.Component
	why       string
}{
	Adam:    {{ledger.ExpAvg, "first moment of Adam"}, {ledger.ExpAvgSq, "second moment of Adam"}},
	Lion:    {{ledger.ExpAvg, "momentum of Lion"}},
	Adagrad: {{ledger.Sum, "sum of squared gradients of Adagrad"}},
	SGD:     {{ledger.MomentumBuffer, "momentum of SGD"}},
}

// Streams returns the arrays of the format.
func (f Format) Streams() []Stream {
	var streams []Stream
	if f.State != FP32 {
		low := Stream{
			Role: LowRole, Component: ledger.MasterWeightsLow, Type: dtype.U16, Read: true, Write: true,
			Why: "the low 16 bits of the fp32 master weights",
		}
		if f.State == Split24 {
			low.Type, low.Why = dtype.U8, "the low 8 bits of the master weights of 24 bits"
		}
		streams = []Stream{
			{
				Role: ParameterRole, Component: ledger.Parameters, Type: dtype.BF16, Read: true, Write: true,
				Why: "bf16, the upper half of the master weights, which the trainer reads",
			},
			low,
		}
	} else {
		if f.hasParameter() {
			streams = []Stream{{
				Role: ParameterRole, Component: ledger.Parameters, Type: f.Parameter, Write: true,
				Why: f.Parameter.String() + " copy of the master weights, which the trainer reads",
			}}
		}
		streams = append(streams, Stream{
			Role: MasterRole, Component: ledger.MasterWeights, Type: dtype.F32, Read: true, Write: true,
			Why: "fp32 master weights",
		})
	}
	streams = append(streams, f.MomentStreams()...)
	return append(streams, Stream{
		Role: GradientRole, Component: ledger.Gradients, Type: f.Gradient, Read: true,
		Why: f.Gradient.String() + " gradients as the trainer leaves them",
	})
}

// MomentStreams returns the arrays of the moments.
func (f Format) MomentStreams() []Stream {
	var streams []Stream
	for i, m := range moments[f.Algorithm] {
		streams = append(streams, Stream{
			Role: FirstMomentRole + Role(i), Component: m.component, Type: f.momentType(), Read: true, Write: true,
			Why: f.Moments.String() + " " + m.why,
		})
	}
	if f.Moments == MomentsInt8 {
		streams = append(streams, Stream{
			Role: HeaderRole, Component: ledger.MomentHeaders, Type: dtype.U16, Read: true, Write: true,
			Shared: Block, Why: fmt.Sprintf("scales of the moments, one for %d parameters", Block),
		})
	}
	return streams
}

// hasParameter reports whether there is a stream of parameters beside the master.
func (f Format) hasParameter() bool { return f.Parameter != dtype.F32 }

func (f Format) momentType() dtype.Type {
	return [...]dtype.Type{dtype.F32, dtype.BF16, dtype.U8}[f.Moments]
}

// granule returns the number of parameters that vector kernels take multiples of.
func (f Format) granule() int { return f.Moments.Tile() }

// ResidentBytes returns the size of all streams for a number of parameters.
func (f Format) ResidentBytes(parameters int64) int64 {
	var sum int64
	for _, s := range f.Streams() {
		sum += s.Bytes(parameters)
	}
	return sum
}

// TrafficBytes returns how many bytes an update of a number of parameters reads and
// writes, added up.
func (f Format) TrafficBytes(parameters int64) int64 {
	var sum int64
	for _, s := range f.Streams() {
		if s.Read {
			sum += s.Bytes(parameters)
		}
		if s.Write {
			sum += s.Bytes(parameters)
		}
	}
	return sum
}

// Chunk is a range of every stream. Streams that a format does not have are empty.
type Chunk struct {
	// First is the place of the first element in its shard. Only the dither of
	// stochastic rounding depends on it. If moments are int8, it is the beginning
	// of a block.
	First     int64
	Parameter []uint16
	Low       []uint16
	LowBytes  []byte // in place of Low in split24 state
	Master    []float32
	Moments   [2]Array
	Headers   []uint16 // of the blocks of int8 moments; the last may be short
	Gradient  Array
}

// Array is a range of numbers of one type.
type Array struct {
	Type dtype.Type // BF16, F16 or F32; U8 for int8 moments
	Data []byte
}

// Len returns the number of elements.
func (a Array) Len() int {
	if len(a.Data) == 0 {
		return 0
	}
	return len(a.Data) / int(a.Type.Size())
}

// Slice returns elements first to end of the array. An array of nil data stays empty.
func (a Array) Slice(first, end int) Array {
	if a.Data == nil {
		return a
	}
	size := int(a.Type.Size())
	return Array{a.Type, a.Data[first*size : end*size]}
}

// Len returns the number of elements of each stream.
func (c Chunk) Len() int { return c.Gradient.Len() }

// Slice returns elements first to end of every stream. They must be full blocks of
// int8 moments, except at the chunk's end.
func (c Chunk) Slice(first, end int) Chunk {
	return Chunk{
		First:     c.First + int64(first),
		Parameter: part(c.Parameter, first, end),
		Low:       part(c.Low, first, end),
		LowBytes:  part(c.LowBytes, first, end),
		Master:    part(c.Master, first, end),
		Moments:   [2]Array{c.Moments[0].Slice(first, end), c.Moments[1].Slice(first, end)},
		Headers:   part(c.Headers, first/Block, (end+Block-1)/Block),
		Gradient:  c.Gradient.Slice(first, end),
	}
}

// Set sets a stream to memory, which must be aligned for its type.
func (c *Chunk) Set(s Stream, memory []byte) {
	numbers := Array{Type: s.Type, Data: memory}
	switch s.Role {
	case ParameterRole:
		c.Parameter = view[uint16](memory)
	case LowRole:
		if s.Type == dtype.U8 {
			c.LowBytes = memory
			return
		}
		c.Low = view[uint16](memory)
	case MasterRole:
		c.Master = view[float32](memory)
	case FirstMomentRole:
		c.Moments[0] = numbers
	case SecondMomentRole:
		c.Moments[1] = numbers
	case HeaderRole:
		c.Headers = view[uint16](memory)
	case GradientRole:
		c.Gradient = numbers
	}
}

// Bytes returns the memory of a stream.
func (c Chunk) Bytes(role Role) []byte {
	switch role {
	case ParameterRole:
		return bytesOf(c.Parameter)
	case LowRole:
		return c.low()
	case MasterRole:
		return bytesOf(c.Master)
	case FirstMomentRole:
		return c.Moments[0].Data
	case SecondMomentRole:
		return c.Moments[1].Data
	case HeaderRole:
		return bytesOf(c.Headers)
	case GradientRole:
		return c.Gradient.Data
	}
	return nil
}

// low returns the memory of the low bits of master weights.
func (c Chunk) low() []byte {
	if c.LowBytes != nil {
		return c.LowBytes
	}
	return bytesOf(c.Low)
}

// part returns a range of a stream that the format may not have.
func part[T any](stream []T, first, end int) []T {
	if stream == nil {
		return nil
	}
	return stream[first:end]
}

// check returns the length of the streams. It panics if they differ in length or do
// not have the format, before any assembly could walk past the end of one.
func (c *Chunk) check(f Format) int {
	n := c.Len()
	has := func(length int, present bool) bool { return present && length == n || !present && length == 0 }
	ok := has(len(c.Parameter), f.hasParameter()) &&
		has(len(c.Low), f.State == Split) && has(len(c.LowBytes), f.State == Split24) &&
		has(len(c.Master), f.State == FP32) &&
		(n == 0 || c.Gradient.Type == f.Gradient)
	for i, m := range c.Moments {
		present := i < f.Algorithm.Moments()
		ok = ok && has(m.Len(), present) && (!present || n == 0 || m.Type == f.momentType())
	}
	blocks := 0
	if f.Moments == MomentsInt8 {
		blocks = (n + Block - 1) / Block
		ok = ok && c.First%Block == 0
	}
	if !ok || len(c.Headers) != blocks {
		panic("kernel: the streams of a chunk differ in length, or are not those of " + f.String())
	}
	return n
}

// pointer returns the address of the first byte of a stream.
func pointer[T any](s []T) *T { return unsafe.SliceData(s) }

// kind returns the number of an element type in the contract of the kernels.
func kind(t dtype.Type) int {
	switch t {
	case dtype.BF16:
		return abi.BF16
	case dtype.F16:
		return abi.FP16
	}
	return abi.Wide
}

// bytesOf returns the bytes of a stream.
func bytesOf[T uint16 | float32](s []T) []byte {
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(pointer(s))), len(s)*int(unsafe.Sizeof(t)))
}

// view returns memory as numbers.
func view[T any](b []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(pointer(b))), len(b)/int(unsafe.Sizeof(t)))
}
