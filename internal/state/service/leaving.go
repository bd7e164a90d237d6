//go:build linux

package service

import (
	"math/bits"

	"plimsoll/internal/state/service/protocol"
)

// A step may leave parameters alone that have no gradients: they keep their weights and moments, and the step is none
// of theirs. Each parameter of a session is a section of its shard.

// bytesOfBits returns how many bytes have a bit for each of n parameters.
func bytesOfBits(n int) int { return (n + 7) / 8 }

// leftAlone returns the numbers of the parameters whose bits are set. An empty list of bits has none.
func (s *heldShard) leftAlone(kind protocol.Kind, list []byte) ([]int, error) {
	count := len(s.document.Parameters)
	if len(list) == 0 {
		return nil, nil
	}
	if len(list) != bytesOfBits(count) {
		return nil, protocol.Refused.Errorf("%v with %d bytes of parameters that it leaves alone: expected a bit for "+
			"each of %d, in %d bytes", kind, len(list), count, bytesOfBits(count))
	}
	var found []int
	for place, eight := range list {
		for ; eight != 0; eight &= eight - 1 {
			found = append(found, 8*place+bits.TrailingZeros8(eight))
		}
	}
	if len(found) > 0 && found[len(found)-1] >= count {
		return nil, protocol.Refused.Errorf("%v leaves parameter %d alone: the session has %d", kind,
			found[len(found)-1], count)
	}
	return found, nil
}

// leaveMissing leaves the parameters of a range alone in the step under way, as they will get no gradients.
func (s *heldShard) leaveMissing(b protocol.ReadyBody) error {
	var parameters []int
	at := uint64(0)
	for number, p := range s.document.Parameters {
		if at >= b.First && at < b.First+b.Count {
			parameters = append(parameters, number)
		}
		if end := at + uint64(p.Count); at < b.First && end > b.First || at < b.First+b.Count && end > b.First+b.Count {
			return protocol.Refused.Errorf("ready: %d elements from %d on have no gradients: expected full "+
				"parameters, but %s has the elements %d to %d", b.Count, b.First, p.Name, at, end-1)
		}
		at += uint64(p.Count)
	}
	if err := s.shard.LeaveMissing(parameters...); err != nil {
		return protocol.OutOfOrder.Errorf("ready without gradients: %v", err)
	}
	return nil
}

// ownSteps returns how many steps parameters have had.
func (s *heldShard) ownSteps(b protocol.RangeBody) ([]byte, error) {
	count := uint64(len(s.document.Parameters))
	if b.Count < 1 || b.Count > protocol.MaximumOwnSteps || b.First > count || b.Count > count-b.First {
		return nil, protocol.Refused.Errorf("own_steps of %d parameters from %d on: expected 1 to %d, of the "+
			"session's %d", b.Count, b.First, protocol.MaximumOwnSteps, count)
	}
	return protocol.Encode(s.shard.OwnSteps()[b.First : b.First+b.Count]), nil
}

// setOwnSteps records how many steps parameters have had. The state is incomplete until set_step.
func (s *heldShard) setOwnSteps(b protocol.OwnStepsBody) error {
	had := make([]int64, len(b.Had))
	for i, n := range b.Had {
		if n > maximumStep {
			return protocol.Refused.Errorf("set_own_steps: parameter %d has had %d steps: expected at most %d",
				b.First+uint64(i), n, int64(maximumStep))
		}
		had[i] = int64(n)
	}
	if err := s.notTorn(protocol.SetOwnSteps); err != nil {
		return err
	}
	s.saveIsOver.Wait() // the checkpoint needs the steps before
	s.header.beginWrite()
	if err := s.shard.SetOwnSteps(int(min(b.First, maximumStep)), had); err != nil {
		return protocol.Refused.Errorf("set_own_steps: %v", err)
	}
	return nil
}
