//go:build linux

package cycle

import (
	"errors"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
)

// memory is the arenas of a rank.
type memory struct {
	arenas                     []*arena.Arena
	states, control, gradients []byte
	window                     []byte
	windowAt, gradientsAt      []ledger.Bytes // where each chunk lies in the window of mode whole, and its gradients
	buffer                     []byte         // parameters or gradients of a chunk on the device
}

// mapMemory maps the arenas of a rank, which are still empty. The caller closes what it returns, even after an error.
func (p *Placement) mapMemory(r Rank) (*memory, error) {
	m := &memory{}
	for _, plan := range p.arenas(r) {
		a, err := arena.New(plan.Name, plan.Size, p.Pages)
		if err != nil {
			return m, err
		}
		m.arenas = append(m.arenas, a)
		switch plan.Component {
		case ledger.HeldStates:
			m.states = a.Bytes()
		case ledger.HeldControl:
			m.control = a.Bytes()
		case ledger.Gradients:
			m.gradients = a.Bytes()
		default:
			window := r.Layout.Window(p.Settings.Whole)
			m.window, m.buffer = a.Bytes()[:window], a.Bytes()[window:]
		}
	}
	var states, gradients ledger.Bytes
	for _, c := range r.Layout.Chunks {
		m.windowAt, m.gradientsAt = append(m.windowAt, states), append(m.gradientsAt, gradients)
		states, gradients = states+c.State, gradients+c.Gradients
	}
	return m, nil
}

func (m *memory) close() (err error) {
	for _, a := range m.arenas {
		err = errors.Join(err, a.Close())
	}
	return err
}
