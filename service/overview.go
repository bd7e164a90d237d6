package service

import (
	"cmp"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/prometheus/procfs"

	"plimsoll/arena"
	"plimsoll/ledger"
	"plimsoll/service/protocol"
)

// status returns the status of a session that was set aside.
func (l *leftSession) status() protocol.SetAside {
	status := protocol.SetAside{Name: l.name, Bytes: l.bytes(), Reason: l.reason.Error()}
	if l.document != nil {
		status.Job, status.Rank, status.Part = l.document.Job, l.document.Rank, l.document.Part
	}
	return status
}

// Overview returns the status of the service.
func (s *Server) Overview() *protocol.Overview {
	s.mu.Lock()
	status := &protocol.Overview{
		Schema: protocol.StatSchema, Service: s.version, Process: os.Getpid(), Seconds: time.Since(s.began).Seconds(),
		Restarts: s.given.Restarts, Kernel: s.kernel.String(), Job: s.job,
		Requests: s.requests.Load(), Refused: s.refused.Load(), Clients: len(s.open),
		Sessions: []protocol.SessionStatus{}, SetAside: []protocol.SetAside{},
	}
	for _, name := range slices.Sorted(maps.Keys(s.aside)) {
		status.SetAside = append(status.SetAside, s.aside[name].status())
	}
	for client := range s.open {
		status.Unanswered += client.unanswered.Load()
		status.QueuedBytes += client.waiting()
	}
	sessions := make([]*session, 0, len(s.all))
	for _, session := range s.all {
		sessions = append(sessions, session)
	}
	slices.SortFunc(sessions, func(a, b *session) int {
		return cmp.Or(a.document.Rank-b.document.Rank, cmp.Compare(a.document.SessionPart(),
			b.document.SessionPart()))
	})
	var planned, measured []ledger.Device
	for _, session := range sessions {
		status.Sessions = append(status.Sessions, session.status())
		planned = append(planned, session.planned())
		measured = append(measured, session.measured())
	}
	s.mu.Unlock()
	status.Ledger = append(ledger.Comparison{}, ledger.Compare(planned, append(measured, own()...))...)
	return status
}

func (s *session) status() protocol.SessionStatus {
	config := s.shard.Config()
	seconds := func(nanoseconds int64) float64 { return time.Duration(nanoseconds).Seconds() }
	return protocol.SessionStatus{
		Rank: config.Rank, Part: config.Part, Optimizer: s.document.Optimizer,
		State: s.document.State, Moments: s.document.Moments, Parameter: s.document.Parameter,
		Gradient: s.document.Gradient,
		Elements: config.Elements, CPUs: config.CPUs, Client: s.holder.Load(), Initialized: s.initialized(),
		Step: s.shard.Steps(), MissesGradients: s.shard.MissesGradients(),
		Saving: s.written.Load() != nil, SavedStep: s.savedStep.Load(),
		StateBytes: config.StateBytes(), TrafficBytes: config.TrafficBytes(),
		StepsMade: s.stepsMade.Load(), StepSeconds: seconds(s.busyTime.Load()),
		LastStepSeconds: seconds(s.lastStep.Load()), LastNormSeconds: seconds(s.lastNorm.Load()),
	}
}

// planned returns what the session's arenas need, in full pages.
func (s *session) planned() ledger.Device {
	config := s.shard.Config()
	d := ledger.HostMemory(config.Rank)
	hold := func(component ledger.Component, bytes ledger.Bytes, why string) {
		d.Phases[0].Hold(ledger.Holding{Component: component, Part: config.Part, Bytes: bytes, Why: why})
	}
	for _, plan := range config.Arenas() {
		hold(plan.Component, config.Pages.Round(plan.Size), plan.Why)
	}
	hold(ledger.SessionHeader, s.header.Mapped(),
		"the document of the open request and the hyperparameters of the prepared step, for a restarted service")
	return d
}

// measured returns how much of the session's arenas is resident. It leaves out arenas
// that cannot be measured.
func (s *session) measured() ledger.Device {
	config := s.shard.Config()
	d := ledger.HostMemory(config.Rank)
	hold := func(component ledger.Component, a *arena.Arena) {
		if resident, err := a.Resident(); err == nil {
			d.Phases[0].Hold(ledger.Holding{Component: component, Part: config.Part, Bytes: resident})
		}
	}
	for i, plan := range config.Arenas() {
		hold(plan.Component, s.shard.Arenas()[i])
	}
	hold(ledger.SessionHeader, s.header.Arena)
	return d
}

// own returns the memory of the service's process besides its arenas, or nothing if /proc cannot be read.
func own() []ledger.Device {
	process, err := procfs.Self()
	if err != nil {
		return nil
	}
	status, err := process.NewStatus()
	if err != nil {
		return nil
	}
	d := ledger.HostMemory(ledger.WholeNode)
	hold := func(component ledger.Component, bytes uint64, why string) {
		d.Phases[0].Hold(ledger.Holding{Component: component, Bytes: ledger.Bytes(bytes), Why: why})
	}
	hold(ledger.ServiceProcess, status.RssAnon+status.RssFile, "the program itself: its text, heap and stacks")
	hold(ledger.ServicePageTables, status.VmPTE,
		"page tables of the arenas: 8 B a page, in the service and in each trainer")
	return []ledger.Device{d}
}
