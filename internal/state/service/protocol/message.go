//go:build linux

// Package protocol is the protocol of the optimizer service (docs/protocol.md): packets,
// the kinds of requests, their bodies, and the documents in them. Service and clients
// share it.
package protocol

import (
	"encoding/binary"
	"fmt"
)

const (
	magic           = 0x4d494c50 // "PLIM"
	protocolVersion = 2
	answerBit       = 1 << 15

	// MaximumPacket is the largest size of a packet.
	MaximumPacket = 64 << 10
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
	Order
	Hold
	OwnSteps
	SetOwnSteps
	Delta
	Decide
	Kinds // 1 more than the last
)

var kindNames = [Kinds]string{
	Open: "open", Window: "window", Write: "write", Read: "read", SetStep: "set_step", Ready: "ready", Norm: "norm",
	Accumulate: "accumulate", Clear: "clear", Step: "step", Wait: "wait", Save: "save", Saved: "saved",
	Commit: "commit", Load: "load", Stat: "stat", Close: "close", Prepare: "prepare", Restore: "restore",
	Order: "order", Hold: "hold", OwnSteps: "own_steps", SetOwnSteps: "set_own_steps",
	Delta: "delta", Decide: "decide",
}

func (k Kind) String() string {
	if k < Open || k >= Kinds {
		return fmt.Sprintf("request %d", uint16(k))
	}
	return kindNames[k]
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

// Errorf returns an answer with this status.
func (s Status) Errorf(format string, values ...any) error {
	return &Error{s, fmt.Sprintf(format, values...)}
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

// Packet is one message.
type Packet struct {
	Kind   Kind
	Number uint32
	Answer bool
	Body   []byte
}

// ParsePacket parses a packet. It refuses one with any field that does not match the packet.
func ParsePacket(data []byte) (Packet, error) {
	var h header
	if len(data) < headerSize {
		return Packet{}, Malformed.Errorf("a packet of %d bytes: a header has %d", len(data), headerSize)
	}
	rest := data[headerSize:]
	if _, err := binary.Decode(data[:headerSize], binary.LittleEndian, &h); err != nil {
		return Packet{}, Malformed.Errorf("a header that cannot be read: %v", err)
	}
	p := Packet{Kind: Kind(h.Kind &^ answerBit), Number: h.Number, Answer: h.Kind&answerBit != 0, Body: rest}
	switch {
	case h.Magic != magic:
		return p, Malformed.Errorf("a packet that begins with %#x: expected %#x", h.Magic, magic)
	case h.Version != protocolVersion:
		return p, Malformed.Errorf("version %d of the protocol: this is version %d; install a client and a "+
			"service of one release", h.Version, protocolVersion)
	case int64(h.Length) != int64(len(rest)):
		return p, Malformed.Errorf("a packet announces %d bytes after its header, but has %d",
			h.Length, len(rest))
	case p.Kind < Open || p.Kind >= Kinds:
		return p, Malformed.Errorf("a request of kind %d: this version has 1 to %d", p.Kind, Kinds-1)
	}
	return p, nil
}

// Encode returns the packet as it is sent.
func (p Packet) Encode() []byte {
	h := header{magic, protocolVersion, uint16(p.Kind), p.Number, uint32(len(p.Body))}
	if p.Answer {
		h.Kind |= answerBit
	}
	data := Encode(h)
	return append(data, p.Body...)
}

// ParseAnswer returns the result in an answer, or the error that the service reported.
func ParseAnswer(data []byte, request Packet) ([]byte, error) {
	p, err := ParsePacket(data)
	switch {
	case err != nil:
		return nil, fmt.Errorf("an answer of the service: %w", err)
	case !p.Answer || p.Kind != request.Kind || p.Number != request.Number:
		return nil, fmt.Errorf("the service answered %v number %d, expected %v number %d", p.Kind, p.Number,
			request.Kind, request.Number)
	case len(p.Body) < 4:
		return nil, fmt.Errorf("the service answered %v without a status", p.Kind)
	}
	status, rest := Status(binary.LittleEndian.Uint32(p.Body)), p.Body[4:]
	if status != Done {
		return nil, &Error{status, string(rest)}
	}
	return rest, nil
}
