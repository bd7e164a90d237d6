//go:build linux

package service

import (
	"fmt"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/service/protocol"
)

// Sums says which sessions have sums of their state, which each step verifies.
type Sums int

// The choices.
const (
	SumsWhereFree Sums = iota // where they take no time
	AllSums
	NoSums
)

// SumsNames are the names of the choices, in their order.
var SumsNames = []string{"auto", "on", "off"}

// ParseSums returns the choice of a name.
func ParseSums(name string) (Sums, error) {
	for i, known := range SumsNames {
		if name == known {
			return Sums(i), nil
		}
	}
	return 0, fmt.Errorf("%q: expected %s", name, fault.OneOf(SumsNames...))
}

// wantsSums reports whether a session that is opened now gets sums.
func (s *Server) wantsSums(d protocol.AnyDocument) bool {
	shard, ok := d.(*protocol.Document)
	if !ok || s.sums == NoSums {
		return false
	}
	format, err := shard.Format()
	return err == nil && (s.sums == AllSums || s.kernel.SumsAreFree(format))
}

// scrubRate is how many bytes of a session are verified in a second while nothing changes it.
const scrubRate = 64 << 20

// scrub verifies the sums of the shard, chunk by chunk, until the session ends. A step verifies them, too: this is for
// sessions that rest.
func (s *heldShard) scrub(ended <-chan struct{}) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for s.shard.Err() == nil {
		select {
		case <-ended:
			return
		case <-pause.C:
		}
		wait := time.Duration(s.shard.Scrub()) * time.Second / scrubRate
		if wait == 0 {
			wait = 100 * time.Millisecond // a step is under way
		}
		pause.Reset(wait)
	}
	s.logf("session %v: %v", keyOf(s.document), s.shard.Err())
}

// startScrubbing begins to scrub, if there are sums; files of a tier always have them. The function that it returns
// ends that.
func (s *heldShard) startScrubbing() (end func()) {
	if c := s.shard.Config(); !c.Sums && c.Tier == nil {
		return func() {}
	}
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		s.scrub(ended)
	}()
	return func() {
		close(ended)
		<-done
	}
}
