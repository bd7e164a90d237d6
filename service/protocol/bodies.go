//go:build linux

package protocol

import (
	"bytes"
	"encoding/binary"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/dtype"
)

const (
	hyperparameters = 7 // number of them for each parameter group in a step
	sizeOfGroup     = 8 * hyperparameters
)

// Hyperparameters are the numbers of one parameter group, in the order of the protocol.
type Hyperparameters = [hyperparameters]float64

// Flags of step, close and order.
const (
	WaitForStep  = 1 // step: answer when it is done
	PreparedStep = 2 // step: use the hyperparameters of prepare
	ArrivingStep = 4 // step: update what ready names, as the gradients come
	GiveBack     = 1 // close: give the state back
	BeginAnew    = 1 // order: forget the order so far
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
		Step uint64 // that has begun before its gradients were there, or 0
	}
	SetStepBody struct{ Step uint64 }
	StepHeader  struct {
		Step          uint64
		GradScale     float64
		Flags, Groups uint32
	}
	WaitBody    struct{ Step, First, Count uint64 }
	OrderHeader struct{ Flags, Ranges uint32 }
	CloseBody   struct{ Flags uint32 }
)

// StepBody is a step, with the hyperparameters of each group.
type StepBody struct {
	StepHeader
	Hyperparameters []Hyperparameters
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
	rest := body[size:]
	if int64(len(rest)) != sizeOfGroup*int64(s.Groups) {
		return s, Malformed.Errorf("%v with %d bytes for %d parameter groups: expected %d bytes a group", kind,
			len(rest), s.Groups, sizeOfGroup)
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
	return Encode(s.StepHeader, s.Hyperparameters)
}

// DecodeReady reads the body of ready, which has no step if the gradients are of no step that has begun.
func DecodeReady(kind Kind, body []byte) (ReadyBody, error) {
	if len(body) == binary.Size(RangeBody{}) {
		r, err := Decode[RangeBody](kind, body)
		return ReadyBody{RangeBody: r}, err
	}
	r, err := Decode[ReadyBody](kind, body)
	if err == nil && r.Step == 0 {
		err = Malformed.Errorf("%v of step 0: expected the number of a step that has begun", kind)
	}
	return r, err
}

// Encode returns the body as it is sent.
func (r ReadyBody) Encode() []byte {
	if r.Step == 0 {
		return Encode(r.RangeBody)
	}
	return Encode(r)
}

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
