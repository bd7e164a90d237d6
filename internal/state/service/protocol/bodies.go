//go:build linux

package protocol

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/dtype"
)

const (
	hyperparameters = 7 // number of them for each parameter group in a step
	sizeOfGroup     = 8 * hyperparameters
)

// Hyperparameters are the numbers of one parameter group, in the order of the protocol.
type Hyperparameters = [hyperparameters]float64

// Flags of step, decide, ready, set_step, close and order.
const (
	WaitForStep  = 1  // step: answer when it is done
	PreparedStep = 2  // step: use the hyperparameters of prepare
	ArrivingStep = 4  // step: update what ready names, as the gradients come
	LeavingStep  = 8  // step, prepare: leave parameters alone that have no gradients
	Speculating  = 16 // step: with ArrivingStep; decide says what becomes of it
	SkipStep     = 1  // decide: retract the step
	NoGradients  = 1  // ready: leave the parameters of the range alone, as they will get no gradients
	KeepOwnSteps = 1  // set_step: each parameter has had the steps of set_own_steps
	RollBack     = 2  // set_step: back to the state before the last step, which a tier still has
	GiveBack     = 1  // close: give the state back
	KeepTier     = 2  // close: the files of a tier stay
	BeginAnew    = 1  // order: forget the order so far
	BeginDelta   = 1  // delta: of no step; note what steps change from now on
	WholeDelta   = 2  // delta: all parameters; note what steps change from now on
)

// Bodies of requests that are numbers.
type (
	OpenBody     struct{ Length uint64 }
	WindowBody   struct{ Bytes uint64 }
	TransferBody struct {
		What, Zero           uint32 // What is a stream
		First, Count, Offset uint64
	}
	AccumulateBody struct {
		Type, Zero           uint32 // Type is of the numbers in the window
		First, Count, Offset uint64
		Number               uint64
	}
	RangeBody struct{ First, Count uint64 }
	ReadyBody struct {
		RangeBody
		Step  uint64 // that has begun before its gradients were there, or 0
		Flags uint64
	}
	SetStepBody struct{ Step, Flags uint64 }
	StepHeader  struct {
		Step          uint64
		GradScale     float64
		Flags, Groups uint32
	}
	WaitBody    struct{ Step, First, Count uint64 }
	OrderHeader struct{ Flags, Ranges uint32 }
	CloseBody   struct{ Flags uint32 }
	DeltaBody   struct{ Flags uint64 }
	// DecideBody is what becomes of a step that speculates. A step that is skipped has no factor.
	DecideBody struct {
		Step      uint64
		GradScale float64
		Flags     uint64
	}
)

// StepBody is a step, with the hyperparameters of each group. LeftAlone has a bit for each parameter of the session,
// the lowest of a byte first, if Flags say so.
type StepBody struct {
	StepHeader
	Hyperparameters []Hyperparameters
	LeftAlone       []byte
}

// DecodeStep reads the body of step or prepare.
func DecodeStep(kind Kind, body []byte) (StepBody, error) {
	var s StepBody
	size := binary.Size(s.StepHeader)
	if len(body) < size {
		return s, Malformed.Errorf("%v with a body of %d bytes: expected at least %d", kind, len(body), size)
	}
	var err error
	if s.StepHeader, err = Decode[StepHeader](kind, body[:size]); err != nil {
		return s, err
	}
	rest, groups := body[size:], sizeOfGroup*int64(s.Groups)
	leaves := s.Flags&LeavingStep != 0
	if n := int64(len(rest)); n < groups || leaves != (n > groups) {
		return s, Malformed.Errorf("%v with %d bytes for %d parameter groups: expected %d bytes a group, and more if "+
			"flags (here %#x) have %#x, for the parameters that it leaves alone",
			kind, len(rest), s.Groups, sizeOfGroup, s.Flags, LeavingStep)
	}
	if leaves {
		s.LeftAlone = rest[groups:]
	}
	s.Hyperparameters = make([]Hyperparameters, s.Groups)
	for i := range s.Hyperparameters {
		group := rest[sizeOfGroup*i : sizeOfGroup*(i+1)]
		if s.Hyperparameters[i], err = Decode[Hyperparameters](kind, group); err != nil {
			return s, err
		}
	}
	return s, nil
}

// Encode returns the body as it is sent.
func (s StepBody) Encode() []byte {
	s.Groups = uint32(len(s.Hyperparameters))
	return Encode(s.StepHeader, s.Hyperparameters, s.LeftAlone)
}

// DecodeReady reads the body of ready. Without a step the gradients are of no step that has begun; without flags they
// are there.
func DecodeReady(kind Kind, body []byte) (ReadyBody, error) {
	r, err := decodeAsFar[ReadyBody](kind, body, binary.Size(RangeBody{}), binary.Size(RangeBody{})+8)
	switch withStep := len(body) > binary.Size(RangeBody{}); {
	case err != nil:
	case withStep && r.Step == 0:
		err = Malformed.Errorf("%v of step 0: expected the number of a step that has begun", kind)
	case len(body) == binary.Size(r) && r.Flags == 0:
		err = Malformed.Errorf("%v with flags that are 0: expected none", kind)
	case r.Flags&^NoGradients != 0:
		err = Refused.Errorf("%v with flags %#x: this version has %#x", kind, r.Flags, NoGradients)
	}
	return r, err
}

// DecodeSetStep reads the body of set_step, which may have no flags.
func DecodeSetStep(kind Kind, body []byte) (SetStepBody, error) {
	b, err := decodeAsFar[SetStepBody](kind, body, 8)
	switch {
	case err != nil:
	case len(body) == binary.Size(b) && b.Flags == 0:
		err = Malformed.Errorf("%v with flags that are 0: expected none", kind)
	case b.Flags&^(KeepOwnSteps|RollBack) != 0 || b.Flags == KeepOwnSteps|RollBack:
		err = Refused.Errorf("%v with flags %#x: this version has %#x or %#x", kind, b.Flags, KeepOwnSteps, RollBack)
	}
	return b, err
}

// decodeAsFar reads a body that is one structure of numbers, or its beginning of one of the sizes.
func decodeAsFar[T any](kind Kind, body []byte, sizes ...int) (T, error) {
	if slices.Contains(sizes, len(body)) {
		var value T
		body = append(slices.Clone(body), make([]byte, binary.Size(value)-len(body))...)
	}
	return Decode[T](kind, body)
}

// Encode returns the body as it is sent.
func (r ReadyBody) Encode() []byte {
	switch {
	case r.Flags != 0:
		return Encode(r)
	case r.Step != 0:
		return Encode(r.RangeBody, r.Step)
	}
	return Encode(r.RangeBody)
}

// Encode returns the body as it is sent.
func (b SetStepBody) Encode() []byte {
	if b.Flags == 0 {
		return Encode(b.Step)
	}
	return Encode(b)
}

// MaximumOwnSteps is how many parameters own_steps and set_own_steps name at most.
const MaximumOwnSteps = 4096

// OwnStepsBody is how many steps parameters have had, from the parameter First on.
type OwnStepsBody struct {
	First uint64
	Had   []uint64
}

// DecodeOwnSteps reads the body of set_own_steps.
func DecodeOwnSteps(kind Kind, body []byte) (OwnStepsBody, error) {
	if n := len(body)/8 - 1; len(body)%8 != 0 || n < 1 || n > MaximumOwnSteps {
		return OwnStepsBody{}, Malformed.Errorf("%v with a body of %d bytes: expected 8, and 8 for each of 1 to %d "+
			"parameters", kind, len(body), MaximumOwnSteps)
	}
	b := OwnStepsBody{Had: make([]uint64, len(body)/8-1)}
	_, err := binary.Decode(body, binary.LittleEndian, &b.First)
	if err == nil {
		_, err = binary.Decode(body[8:], binary.LittleEndian, b.Had)
	}
	return b, err
}

// Encode returns the body as it is sent.
func (b OwnStepsBody) Encode() []byte { return Encode(b.First, b.Had) }

// OrderBody is an order, or a part of one.
type OrderBody struct {
	Flags  uint32
	Ranges []RangeBody
}

// MaximumOrder is the most ranges that the order of a session has.
const MaximumOrder = 1 << 20

// DecodeOrder reads the body of order.
func DecodeOrder(kind Kind, body []byte) (OrderBody, error) {
	var h OrderHeader
	size := binary.Size(h)
	if len(body) < size {
		return OrderBody{}, Malformed.Errorf("%v with a body of %d bytes: expected at least %d", kind, len(body), size)
	}
	h, err := Decode[OrderHeader](kind, body[:size])
	rest := body[size:]
	each := binary.Size(RangeBody{})
	if err == nil && int64(len(rest)) != int64(each)*int64(h.Ranges) {
		err = Malformed.Errorf("%v with %d bytes for %d ranges: expected %d bytes a range", kind, len(rest), h.Ranges,
			each)
	}
	if err != nil {
		return OrderBody{}, err
	}
	o := OrderBody{Flags: h.Flags, Ranges: make([]RangeBody, h.Ranges)}
	_, err = binary.Decode(rest, binary.LittleEndian, o.Ranges)
	return o, err
}

// Encode returns the body as it is sent.
func (o OrderBody) Encode() []byte {
	return Encode(OrderHeader{o.Flags, uint32(len(o.Ranges))}, o.Ranges)
}

// DecodeText decodes a request's body that is a JSON document.
func DecodeText[T any](kind Kind, body []byte) (T, error) {
	var value T
	if err := json.Unmarshal(body, &value, json.RejectUnknownMembers(true)); err != nil {
		return value, Refused.Errorf("%v: the document cannot be read: %v", kind, err)
	}
	return value, nil
}

// Bodies of requests that are JSON documents.
type (
	SaveBody struct {
		Directory string         `json:"directory"`
		Step      *int64         `json:"step,omitempty"` // of the state; needed for states that the trainer updates
		Training  jsontext.Value `json:"training,omitempty"`
		Identity  string         `json:"identity,omitempty"`
		Replica   int            `json:"replica,omitempty"`
		Replicas  int            `json:"replicas,omitempty"`
	}
	CommitBody struct {
		Directory string `json:"directory"`
		Step      int64  `json:"step"`
		Identity  string `json:"identity,omitempty"`
		Without   []int  `json:"ranks_without_state,omitempty"`
	}
	LoadBody struct {
		Directory string `json:"directory"`
		Several   bool   `json:"several,omitempty"`
	}
	// RestoreBody names a session that was set aside.
	RestoreBody struct {
		Session string `json:"session"`
		Discard bool   `json:"discard,omitempty"` // give the session back instead
	}
)

// The streams of the state, as write and read number them.
const (
	MasterWeights = iota
	FirstMoment
	SecondMoment
	Streams // how many there are
)

// NumberTypes are the types of numbers in the window, in the numbering of accumulate.
var NumberTypes = [...]dtype.Type{dtype.BF16, dtype.F16, dtype.F32}

// Encode writes numbers, and structures of numbers, one after the other.
func Encode(values ...any) []byte {
	var b bytes.Buffer
	for _, v := range values {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(err) // a type without a fixed size: a bug in this package
		}
	}
	return b.Bytes()
}

// Decode reads a body that is exactly one structure of numbers.
func Decode[T any](kind Kind, body []byte) (T, error) {
	var value T
	if size := binary.Size(value); len(body) != size {
		return value, Malformed.Errorf("%v with a body of %d bytes: expected %d", kind, len(body), size)
	}
	_, err := binary.Decode(body, binary.LittleEndian, &value)
	return value, err
}
