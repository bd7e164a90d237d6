//go:build linux

package simulation

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
	"plimsoll/internal/state/states"
)

// Beside its shards, a service may hold states that a trainer updates itself. The trainer of these writes words that
// tell chunk and step, so whatever is lost, torn or of another step shows. It dies between two regions, its successor
// finishes the step where it can, and it saves and loads.

// holder is that trainer, over all its lives.
type holder struct {
	station  *station
	document *protocol.HoldDocument
	*servicetest.Held
	finished int64 // the last step that is known to be finished
	begun    int64
	saved    int64 // the step of the last checkpoint; -1: there is none
	loading  bool  // a load was begun, and nobody knows how it ended
	dropped  bool  // torn states were given back
}

// newHolder draws states of one to three chunks.
func newHolder(st *station) *holder {
	d := &protocol.HoldDocument{
		Schema:      protocol.HoldSchema,
		Owner:       protocol.Owner{Job: "simulated", World: 1, LocalWorld: 1, Part: "states"},
		Description: states.Description{Recovery: st.chance(0.6), SettingsBytes: 64},
	}
	if d.Recovery {
		d.GradientBytes = 640
	}
	for chunk := range 1 + st.random.IntN(3) {
		name := fmt.Sprintf("layer%d", chunk)
		d.Chunks = append(d.Chunks, states.Chunk{Bytes: 512 << chunk,
			Tensors: []states.Tensor{{Name: name, Key: "exp_avg", Type: dtype.F32, Shape: []int64{100 << chunk}}},
			Scalars: []states.Scalar{{Name: name, Key: "step", Type: dtype.I64}}})
	}
	return &holder{station: st, document: d, saved: -1}
}

// checkpoints is the folder of its checkpoints. It is in a file system that no fault meets.
func (h *holder) checkpoints() string { return filepath.Join(h.station.checkpoints, "states") }

// word is what the states of a chunk consist of after a step.
func word(chunk int, step int64) uint64 { return uint64(step)<<16 | uint64(chunk) | 1<<63 }

// gradientChunk stands for the gradients in their words.
const gradientChunk = 9

// live is what the trainer does in one life of the service. A number that has changed in memory ends it.
func (h *holder) live() (err error) {
	defer func() {
		switch cause := recover().(type) {
		case nil:
		case *checked.Damage:
			err = h.Control.Named(cause)
		default:
			panic(cause)
		}
	}()
	st := h.station
	if err := h.open(); err != nil {
		return err
	}
	for range 1 + st.random.IntN(3) {
		next := h.step
		switch draw := st.random.Float64(); {
		case draw < 0.2:
			next = h.save
		case draw < 0.35 && h.saved >= 0:
			next = h.load
		case draw < 0.5:
			next = h.die
		case draw < 0.55:
			next = h.askWrongly
		}
		if err := next(); err != nil {
			return err
		}
	}
	return nil
}

// open holds the states, and brings what the trainer before has left to where the next step begins.
func (h *holder) open() (err error) {
	st := h.station
	st.does("holding")
	if h.Held, err = servicetest.Hold(st.keeper.Socket, h.document); err != nil {
		return st.gone(err)
	}
	if err := st.gone(nil); err != nil {
		return err
	}
	at, now := h.Moment(), h.Held.Held.Condition
	st.logf("states at %+v are %s", at, now)
	switch {
	case h.dropped && now == states.New:
		h.finished, h.begun = 0, 0
	case h.loading:
		if now == states.Whole {
			h.finished, h.begun = at.Steps, at.Steps // the load came to an end, or has not begun
		}
	case at.Steps < h.finished || at.Steps > h.begun:
		return wrong("states are at %+v; step %d was finished, and step %d begun", at, h.finished, h.begun)
	}
	return h.settle(now)
}

// settle brings states in a condition to a step.
func (h *holder) settle(now states.Condition) error {
	at := h.Moment()
	switch now {
	case states.New:
		h.Control.Position.Store(0)
		h.Control.GradientsOf.Store(0)
		if h.saved >= 0 {
			return h.load()
		}
	case states.Redo:
		if err := checkWords("gradients", h.HeldGradients(), word(gradientChunk, at.Steps+1)); err != nil {
			return err
		}
		return h.step()
	case states.Torn:
		if h.document.Recovery && !h.loading {
			return wrong("states with recovery are torn at %+v", at)
		}
		return h.replace()
	}
	if err := h.station.gone(nil); err != nil {
		return err
	}
	h.finished, h.loading, h.dropped = h.Moment().Steps, false, false
	return h.check()
}

// replace replaces torn states: by those of a checkpoint, or by none.
func (h *holder) replace() error {
	if h.saved >= 0 {
		return h.load()
	}
	h.station.does("giving states back")
	h.dropped = true
	err := h.Close()
	h.Held = nil
	if err = h.station.gone(err); err != nil {
		return err
	}
	return h.open()
}

// step makes a step, or finishes one, region by region.
func (h *holder) step() error {
	h.station.does("moving states")
	steps := h.Moment().Steps
	h.begun = steps + 1
	if h.document.Recovery && h.Control.GradientsOf.Load() != uint64(steps)+1 {
		fillWords(h.HeldGradients(), word(gradientChunk, steps+1))
		h.Control.GradientsOf.Store(uint64(steps) + 1)
	}
	for at := h.Moment(); at.Steps == steps; at = h.Moment() {
		if err := h.move(at); err != nil {
			return err
		}
	}
	h.finished, h.loading = steps+1, false
	return h.check()
}

// move moves the next region, and says so.
func (h *holder) move(at states.Moment) error {
	if err := h.awaitRead(); err != nil {
		return err
	}
	chunk := h.Layout.Next(at)
	fillWords(h.Region(chunk, at.Steps+1), word(chunk, at.Steps+1))
	h.Control.Scalars(at.Steps + 1)[chunk] = word(chunk, at.Steps+1) // each has one
	h.Control.Position.Add(1)
	return h.station.gone(nil)
}

// awaitRead waits until a save has read what the next region overwrites.
func (h *holder) awaitRead() error {
	position := h.Control.Position.Load()
	for h.Control.Read.Load() < position {
		h.Control.Wanted.Store(position)
		if err := h.station.gone(nil); err != nil {
			return err
		}
		time.Sleep(20 * time.Microsecond)
	}
	h.Control.Wanted.Store(0)
	return nil
}

// die ends the trainer, perhaps in the middle of a step, and begins its successor.
func (h *holder) die() error {
	steps := h.Moment().Steps
	if h.station.chance(0.7) {
		h.station.does("moving states that its trainer leaves")
		h.begun = steps + 1
		if h.document.Recovery {
			fillWords(h.HeldGradients(), word(gradientChunk, steps+1))
			h.Control.GradientsOf.Store(uint64(steps) + 1)
		}
		for range h.station.random.IntN(h.Layout.Chunks()) {
			if err := h.move(h.Moment()); err != nil {
				return err
			}
		}
	}
	err := h.Detach()
	h.Held = nil
	if err = h.station.gone(err); err != nil {
		return err
	}
	return h.open()
}

// save makes a checkpoint, perhaps while the next step is made.
func (h *holder) save() error {
	st, steps := h.station, h.Moment().Steps
	if steps == 0 {
		return nil // there is nothing to save
	}
	st.does("saving states")
	if err := h.SaveStep(h.checkpoints(), steps); err != nil {
		return st.gone(err)
	}
	if st.chance(0.5) {
		if err := h.step(); err != nil {
			return err
		}
	}
	st.does("saving states")
	if _, err := h.Saved(); err != nil {
		return st.gone(err)
	}
	if err := h.Commit(h.checkpoints(), steps); err != nil {
		return st.gone(err)
	}
	if err := st.gone(nil); err != nil {
		return err
	}
	h.saved = max(h.saved, steps)
	return nil
}

// load loads the newest checkpoint.
func (h *holder) load() error {
	st := h.station
	st.does("loading states")
	h.loading = true
	step, err := h.Load(h.checkpoints())
	if err != nil {
		return st.gone(err)
	}
	if err := st.gone(nil); err != nil {
		return err
	}
	if at := h.Moment(); step < h.saved || at != (states.Moment{Steps: step}) {
		return wrong("states of step %d were saved, step %d was loaded, and they are at %+v", h.saved, step, at)
	}
	h.saved, h.finished, h.begun, h.loading = step, step, step, false
	return h.check()
}

// askWrongly asks for what such a session does not have: it is refused, and changes nothing.
func (h *holder) askWrongly() error {
	before := h.Moment()
	err := h.Session.Step(before.Steps+1, 1, true, groupsOf(1)...)
	if failed := h.station.gone(nil); failed != nil {
		return failed
	}
	var refused *protocol.Error
	if !errors.As(err, &refused) || refused.Status != protocol.Refused || h.Moment() != before {
		return wrong("a step of states that the trainer updates: %v", err)
	}
	return h.check()
}

// check compares all regions and numbers with what they are at the position.
func (h *holder) check() error {
	at := h.Moment()
	for chunk, c := range h.document.Chunks {
		steps := h.Layout.StepsOf(chunk, at)
		if steps == 0 {
			continue
		}
		what := fmt.Sprintf("states at %+v, chunk %d", at, chunk)
		if got := h.Control.Scalars(steps)[chunk]; got != word(chunk, steps) {
			return wrong("%s: its number is %#x", what, got)
		}
		for _, tensor := range c.Tensors {
			region := h.Region(chunk, steps)[tensor.Offset:][:tensor.Bytes()]
			if err := checkWords(what, region, word(chunk, steps)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (h *holder) letGo() {
	if h != nil && h.Held != nil {
		_ = h.Detach()
		h.Held = nil
	}
}

// lost says that the memory is gone: what is left is a checkpoint.
func (h *holder) lost() {
	if h != nil {
		h.dropped, h.loading = true, false
		h.finished, h.begun = 0, math.MaxInt64>>1
	}
}

func fillWords(memory []byte, word uint64) {
	for i := 0; i+8 <= len(memory); i += 8 {
		binary.LittleEndian.PutUint64(memory[i:], word)
	}
}

func checkWords(what string, memory []byte, want uint64) error {
	for i := 0; i+8 <= len(memory); i += 8 {
		if got := binary.LittleEndian.Uint64(memory[i:]); got != want {
			return wrong("%s: word %d is %#x, want %#x", what, i/8, got, want)
		}
	}
	return nil
}
