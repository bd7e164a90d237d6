//go:build linux

package servicetest

import (
	"errors"
	"fmt"
	"time"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/states"
)

// Held is states that the service holds, and that this process updates.
type Held struct {
	Session // without its own arenas
	Held    protocol.Held
	Layout  *states.Layout
	Control *states.Control

	document *protocol.HoldDocument
	arenas   map[ledger.Component]*arena.Arena
}

// Hold makes a session that holds states, or attaches to one that exists.
func Hold(socket string, d *protocol.HoldDocument) (*Held, error) {
	dialed, err := client.Dial(socket)
	if err != nil {
		return nil, err
	}
	h := &Held{Session: Session{Client: *dialed}, document: d, Layout: states.NewLayout(d.Chunks)}
	h.arenas, err = open(&h.Client, protocol.Hold, d, func(result []byte) ([]protocol.WelcomeArena, error) {
		err := json.Unmarshal(result, &h.Held)
		return h.Held.Arenas, err
	})
	if err == nil && (h.arenas[ledger.HeldStates] == nil || h.arenas[ledger.HeldControl] == nil) {
		err = errors.New("the answer to hold lacks states or their control")
	}
	if err == nil {
		h.Control, err = states.OverlayControl(h.arenas[ledger.HeldControl].Bytes(), &d.Description)
	}
	if err != nil {
		return nil, errors.Join(err, h.Detach())
	}
	return h, nil
}

// Moment returns how far the states are.
func (h *Held) Moment() states.Moment { return h.Layout.At(h.Control.Position.Load()) }

// Region returns the region of a chunk in the state after so many steps.
func (h *Held) Region(chunk int, steps int64) []byte {
	begin := h.Layout.Offset(chunk, steps)
	return h.arenas[ledger.HeldStates].Bytes()[begin : begin+h.document.Chunks[chunk].Bytes]
}

// HeldGradients returns the gradients that are held for recovery.
func (h *Held) HeldGradients() []byte { return h.arenas[ledger.Gradients].Bytes() }

// AwaitRead waits until the next region may be written: a save may still read what it overwrites.
func (h *Held) AwaitRead() {
	position := h.Control.Position.Load()
	if h.Control.Read.Load() >= position {
		return
	}
	h.Control.Wanted.Store(position)
	for h.Control.Read.Load() < position {
		time.Sleep(20 * time.Microsecond)
	}
	h.Control.Wanted.Store(0)
}

// SaveStep begins to write the states of a step into a folder of checkpoints.
func (h *Held) SaveStep(directory string, step int64) error {
	saved, err := h.Ask(protocol.Save, protocol.SaveBody{Directory: directory, Step: &step})
	if err == nil && saved != step {
		err = fmt.Errorf("step %d is being saved: expected %d", saved, step)
	}
	return err
}

// Detach closes the connection and unmaps the arenas. The service keeps the states.
func (h *Held) Detach() error {
	err := h.Hangup()
	for _, a := range h.arenas {
		err = errors.Join(err, a.Close())
	}
	return err
}

// Close gives the states back and detaches.
func (h *Held) Close() error {
	return errors.Join(h.Do(protocol.Close, protocol.Encode(protocol.CloseBody{Flags: protocol.GiveBack})), h.Detach())
}
