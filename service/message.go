package service

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// What docs/protocol.md fixes.
const (
	magic            = 0x4d494c50 // "PLIM"
	protocolVersion  = 2
	maximumPacket    = 64 << 10
	answerBit        = 1 << 15
	hyperparameters  = 7 // number of them for each parameter group in a step
	waitForStep      = 1 // flags of a step
	preparedStep     = 2
	giveBack         = 1 // flag of close
	descriptorsAtEnd = 16
)

// Kind is the kind of a request.
type Kind uint16

// The kinds of requests.
const (
	Open Kind = iota + 1
	Window
	Write
	Read
	SetStep
	Ready
	Norm
	Accumulate
	Clear
	Step
	Wait
	Save
	Saved
	Commit
	Load
	Stat
	Close
	Prepare
	Restore
	kinds
)

func (k Kind) String() string {
	names := [...]string{"open", "window", "write", "read", "set_step", "ready", "norm", "accumulate", "clear", "step",
		"wait", "save", "saved", "commit", "load", "stat", "close", "prepare", "restore"}
	if k < Open || k >= kinds {
		return fmt.Sprintf("request %d", uint16(k))
	}
	return names[k-Open]
}

// Status is the outcome of a request.
type Status uint32

// The statuses of answers.
const (
	Done Status = iota
	Malformed
	Refused
	DoesNotFit
	Busy
	NotPermitted
	OutOfOrder
	Storage
	Internal
)

func (s Status) String() string {
	names := [...]string{"done", "malformed", "refused", "does_not_fit", "busy", "not_permitted", "out_of_order",
		"storage", "internal"}
	if s > Internal {
		return fmt.Sprintf("status %d", uint32(s))
	}
	return names[s]
}

// Error is an answer with a status other than Done.
type Error struct {
	Status  Status
	Message string
}

func (e *Error) Error() string { return e.Message }

func fail(status Status, format string, values ...any) error {
	return &Error{status, fmt.Sprintf(format, values...)}
}

// header begins every packet.
type header struct {
	Magic   uint32
	Version uint16
	Kind    uint16
	Number  uint32
	Length  uint32
}

var headerSize = binary.Size(header{})

// packet is one message.
type packet struct {
	kind   Kind
	number uint32
	answer bool
	body   []byte
}

// parsePacket refuses a packet with any field that does not match the packet.
func parsePacket(data []byte) (packet, error) {
	var h header
	if len(data) < headerSize {
		return packet{}, fail(Malformed, "a packet of %d bytes: a header has %d", len(data), headerSize)
	}
	rest := data[headerSize:]
	if _, err := binary.Decode(data[:headerSize], binary.LittleEndian, &h); err != nil {
		return packet{}, fail(Malformed, "a header that cannot be read: %v", err)
	}
	p := packet{kind: Kind(h.Kind &^ answerBit), number: h.Number, answer: h.Kind&answerBit != 0, body: rest}
	switch {
	case h.Magic != magic:
		return p, fail(Malformed, "a packet that begins with %#x: expected %#x", h.Magic, magic)
	case h.Version != protocolVersion:
		return p, fail(Malformed, "version %d of the protocol: this is version %d; install a client and a "+
			"service of one release", h.Version, protocolVersion)
	case int64(h.Length) != int64(len(rest)):
		return p, fail(Malformed, "a packet announces %d bytes after its header, but has %d",
			h.Length, len(rest))
	case p.kind < Open || p.kind >= kinds:
		return p, fail(Malformed, "a request of kind %d: this version has 1 to %d", p.kind, kinds-1)
	}
	return p, nil
}

func (p packet) encode() []byte {
	h := header{magic, protocolVersion, uint16(p.kind), p.number, uint32(len(p.body))}
	if p.answer {
		h.Kind |= answerBit
	}
	data := encode(h)
	return append(data, p.body...)
}

// encode writes numbers, and structures of numbers, one after the other.
func encode(values ...any) []byte {
	var b bytes.Buffer
	for _, v := range values {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(err) // a type without a fixed size: a bug in this package
		}
	}
	return b.Bytes()
}

// decode reads a body that is exactly one structure of numbers.
func decode[T any](kind Kind, body []byte) (T, error) {
	var value T
	if size := binary.Size(value); len(body) != size {
		return value, fail(Malformed, "%v with a body of %d bytes: expected %d", kind, len(body), size)
	}
	_, err := binary.Decode(body, binary.LittleEndian, &value)
	return value, err
}

// Bodies of requests.
type (
	openBody   struct{ Length uint64 }
	windowBody struct{ Bytes uint64 }
	transfer   struct {
		What, Zero           uint32 // What is a stream
		First, Count, Offset uint64
	}
	accumulation struct {
		Type, Zero           uint32 // Type is of the numbers in the window
		First, Count, Offset uint64
		Number               uint64
	}
	stretch    struct{ First, Count uint64 }
	setStep    struct{ Step uint64 }
	stepHeader struct {
		Step          uint64
		Factor        float64
		Flags, Groups uint32
	}
	waitBody  struct{ Step, First, Count uint64 }
	closeBody struct{ Flags uint32 }
	// restoreBody names a session that was set aside.
	restoreBody struct {
		Session string `json:"session"`
		Discard bool   `json:"discard,omitempty"` // give the session back instead
	}
)

// stepBody is a step, with the hyperparameters of each group.
type stepBody struct {
	stepHeader
	groups [][hyperparameters]float64
}

// decodeStep reads the body of step or prepare.
func decodeStep(kind Kind, body []byte) (stepBody, error) {
	var s stepBody
	size := binary.Size(s.stepHeader)
	if len(body) < size {
		return s, fail(Malformed, "%v with a body of %d bytes: expected at least %d", kind, len(body), size)
	}
	var err error
	if s.stepHeader, err = decode[stepHeader](kind, body[:size]); err != nil {
		return s, err
	}
	rest := body[size:]
	const group = 8 * hyperparameters
	if int64(len(rest)) != group*int64(s.Groups) {
		return s, fail(Malformed, "%v with %d bytes for %d parameter groups: expected %d bytes a group", kind,
			len(rest), s.Groups, group)
	}
	s.groups = make([][hyperparameters]float64, s.Groups)
	for i := range s.groups {
		if s.groups[i], err = decode[[hyperparameters]float64](kind, rest[group*i:group*(i+1)]); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (s stepBody) encode() []byte {
	s.Groups = uint32(len(s.groups))
	return encode(s.stepHeader, s.groups)
}
