//go:build linux

package protocol

import (
	"errors"
	"fmt"

	"plimsoll/internal/state/states"
)

// HoldSchema is the schema of [HoldDocument].
const HoldSchema = "plimsoll.hold/1"

// HoldDocument describes the states that a session holds for a trainer, which updates them itself. Clients send it with
// hold.
type HoldDocument struct {
	Schema string `json:"schema"`
	Owner
	states.Description
}

// Validate reports what is wrong with the document.
func (h *HoldDocument) Validate() error {
	if h.Schema != HoldSchema {
		return fmt.Errorf("schema is %q: expected %q", h.Schema, HoldSchema)
	}
	if err := h.Owner.validate(); err != nil {
		return err
	}
	return h.Description.Validate()
}

// Difference returns the first difference to the document of an earlier session that matters, or nil.
func (h *HoldDocument) Difference(was AnyDocument) error {
	other, holds := was.(*HoldDocument)
	switch {
	case !holds:
		return errors.New("it is states that the trainer updates, and was a shard that the service updates")
	case h.World != other.World:
		return fmt.Errorf("world is %d, and was %d", h.World, other.World)
	}
	return h.Description.Difference(&other.Description)
}

// HeldSchema is the schema of [Held].
const HeldSchema = "plimsoll.held/1"

// Held is the answer to hold.
type Held struct {
	Schema   string `json:"schema"`
	Attached bool   `json:"attached"`
	Service  string `json:"service"`
	// Condition is that of the states, and Step the last step that was finished.
	Condition states.Condition `json:"condition"`
	Step      int64            `json:"step"`
	Arenas    []WelcomeArena   `json:"arenas"`
}
