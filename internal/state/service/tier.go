//go:build linux

package service

import (
	"fmt"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/tier"
)

// Tier says where a service has the state of its sessions, but for what trainers map. The zero value is memory.
type Tier struct {
	Folders []string // one on each disk
	Memory  ledger.Bytes
	Disk    tier.Disk // nil: the file systems of this host
}

func (t Tier) disk() tier.Disk {
	if t.Disk == nil {
		return tier.HostDisk{}
	}
	return t.Disk
}

// isOn reports whether there is a tier.
func (t Tier) isOn() bool { return len(t.Folders) > 0 }

// tierOf returns the tier of a session with a window.
func (s *Server) tierOf(d *protocol.Document, window engine.Window) (*engine.Tier, error) {
	t := s.tier
	label, err := labelOf(d)
	if err != nil {
		return nil, err
	}
	return &engine.Tier{
		Disk: t.disk(), Folders: t.Folders, Name: fmt.Sprintf("rank%05d-%s", d.Rank, d.SessionPart()),
		Label: label, Window: window, Suits: func(label []byte) error { return suits(d, label) },
		Mended: func(what string) { s.logf("session %v: %s", keyOf(d), what) },
	}, nil
}

// labelOf returns the document without what may differ from one opening to the next.
func labelOf(d *protocol.Document) ([]byte, error) {
	lasting := *d
	lasting.LocalWorld, lasting.CPUs = 1, nil
	return json.Marshal(&lasting)
}

// suits refuses the label of another session.
func suits(d *protocol.Document, label []byte) error {
	found, err := protocol.ReadDocument(label)
	if err != nil {
		return fmt.Errorf("its label cannot be read: %w", err)
	}
	own, of := d.Of(), found.Of()
	if own.Job != of.Job || own.Rank != of.Rank || own.SessionPart() != of.SessionPart() {
		return fmt.Errorf("it is of session %v of job %s, and this is session %v of job %s", keyOf(found), of.Job,
			keyOf(d), own.Job)
	}
	if err := d.Difference(found); err != nil {
		return fmt.Errorf("it is of this session, but differs: %w", err)
	}
	return nil
}

// windowOf returns the window of a new session. The ranks of the host share the memory of the tier.
func (s *Server) windowOf(d *protocol.Document, config engine.ShardConfig) (engine.Window, error) {
	left := s.tier.Memory / ledger.Bytes(d.LocalWorld)
	s.mu.Lock()
	for k, session := range s.all {
		if held, ok := session.contents.(*heldShard); ok && k.rank == d.Rank {
			if c := held.shard.Config(); c.Tier != nil {
				left -= c.WindowBytes(c.Tier.Window)
			}
		}
	}
	s.mu.Unlock()
	if window := config.FirstWindow(left); window.Lanes > 0 {
		return window, nil
	}
	return engine.Window{}, protocol.DoesNotFit.Errorf("a window of the tier for session %v takes at least %v, and of "+
		"the %v of --memory %v are left to rank %d, of %d ranks; raise --memory", keyOf(d), config.LeastWindow(),
		s.tier.Memory, max(0, left), d.Rank, d.LocalWorld)
}

// putOnTier gives a shard the tier of the service, with a window. It returns the configuration, or nil if all of the
// state is in memory.
func (s *Server) putOnTier(d *protocol.Document, config *engine.ShardConfig,
	window engine.Window) (*engine.ShardConfig, error) {
	if window.Lanes == 0 || window == newWindow && !s.tier.isOn() {
		return nil, nil
	}
	if !s.tier.isOn() {
		return nil, protocol.Refused.Errorf("its state is on a tier: start the service with the same --tier again")
	}
	var err error
	if config.Tier, err = s.tierOf(d, window); err == nil && window == newWindow {
		config.Tier.Window, err = s.windowOf(d, *config)
	}
	return config, err
}

// checkTier refuses a tier that does not fit on its disks, before the first byte is taken. It counts the other ranks of
// this host, each of which needs as much.
func (s *Server) checkTier(planned *design) error {
	if planned.tier == nil {
		return nil
	}
	plan := planned.tier.TierPlan()
	exists, err := tier.Exists(planned.tier.Tier.Disk, plan)
	if err != nil {
		return protocol.Storage.Errorf("the tier: %v", err)
	}
	if exists {
		return nil // it has its room
	}
	plans := make([]tier.Plan, s.expected(planned.document.Of()))
	for i := range plans {
		plans[i] = plan
	}
	if err := tier.CheckRoom(planned.tier.Tier.Disk, plans...); err != nil {
		return protocol.DoesNotFit.Errorf("%v", err)
	}
	return nil
}

// restoreFromTier takes the state that the files of a tier hold, if they hold one.
func (s *heldShard) restoreFromTier() error {
	found, err := s.shard.Restore()
	if s.shard.IsTorn() {
		s.logf("session %v: the tier has a commit that is not whole: a step was being committed when the power was "+
			"lost, or a file has changed since; the state is that of step %d", keyOf(s.document), s.shard.Steps())
	}
	if err != nil || !found {
		return err
	}
	s.logf("session %v: the tier has its state of step %d", keyOf(s.document), s.shard.Steps())
	s.begun = s.shard.Steps()
	s.header.condition.Store(stateIsWhole)
	s.wasOnTier = true
	return nil
}

// canGoBack reports whether the state before the last step can be the session's.
func (s *heldShard) canGoBack() bool { return s.header.initialized() && s.shard.CanRollBack() }

// rollBack makes the state before the last step the session's.
func (s *heldShard) rollBack(step uint64) error {
	if !s.canGoBack() {
		return protocol.OutOfOrder.Errorf("set_step %d with flags %#x: only a state that was found on a tier can go "+
			"back by a step, before it makes one", step, protocol.RollBack)
	}
	if int64(step) == s.shard.Steps()-1 {
		s.header.forgetSteps() // first: a service that is killed meanwhile leaves none of steps that are gone
	}
	if err := s.shard.RollBack(int64(step)); err != nil {
		return protocol.Refused.Errorf("set_step %d with flags %#x: %v", step, protocol.RollBack, err)
	}
	s.begun = int64(step)
	return nil
}

// removeTier removes the files of a session that was given back.
func (s *session) removeTier() error {
	held, ok := s.contents.(*heldShard)
	if !ok {
		return nil
	}
	return held.shard.Config().RemoveTier()
}

// describeTier fills in what a tier has moved.
func (s *heldShard) describeTier(status *protocol.SessionStatus) {
	c := s.shard.Config()
	if c.Tier == nil {
		return
	}
	t := &protocol.TierStatus{Folders: c.Tier.Folders, Window: c.WindowBytes(c.Tier.Window)}
	plan := c.TierPlan()
	for _, size := range plan.Bytes() {
		t.Bytes += size
	}
	t.StepReads, t.StepWrites = plan.StepBytes()
	t.Read, t.Written = s.shard.TierTraffic()
	status.Tier = t
}
