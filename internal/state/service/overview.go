//go:build linux

package service

import (
	"cmp"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/prometheus/procfs"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/protocol"
)

// status returns the status of a session that was set aside.
func (l *leftSession) status() protocol.SetAside {
	status := protocol.SetAside{Name: l.name, Bytes: l.bytes(), Reason: l.reason.Error()}
	if l.document != nil {
		of := l.document.Of()
		status.Job, status.Rank, status.Part = of.Job, of.Rank, of.Part
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
		x, y := a.document.Of(), b.document.Of()
		return cmp.Or(x.Rank-y.Rank, cmp.Compare(x.SessionPart(), y.SessionPart()))
	})
	var planned, measured []ledger.Device
	for _, session := range sessions {
		var now protocol.SessionStatus
		if session.guard(func() { now = session.status() }) != nil {
			status.SetAside = append(status.SetAside, session.setAside())
			continue
		}
		status.Sessions = append(status.Sessions, now)
		planned = append(planned, session.planned())
		measured = append(measured, session.measured())
	}
	s.mu.Unlock()
	status.Ledger = append(ledger.Comparison{}, ledger.Compare(planned, append(measured, own()...))...)
	return status
}

func (s *session) status() protocol.SessionStatus {
	of := s.document.Of()
	status := protocol.SessionStatus{
		Rank: of.Rank, Part: of.SessionPart(), Client: s.holder.Load(), Step: s.contents.steps(),
		Saving: s.written.Load() != nil, SavedStep: s.savedStep.Load(),
	}
	if s.place != arena.Memory {
		status.Folder, status.FileSystem = string(s.place), fileSystem(string(s.place))
	}
	s.contents.describe(&status)
	return status
}

// planned returns what the session's arenas need, in full pages.
func (s *session) planned() ledger.Device {
	of := s.document.Of()
	d := ledger.HostMemory(of.Rank)
	hold := func(component ledger.Component, bytes ledger.Bytes, why string) {
		d.Phases[0].Hold(ledger.Holding{Component: component, Part: of.SessionPart(), Bytes: bytes, Why: why})
	}
	for _, plan := range s.plans {
		hold(plan.Component, s.pages.Round(plan.Size), plan.Why)
	}
	hold(ledger.SessionHeader, s.header.Mapped(),
		"the document of the request and the hyperparameters of the prepared step, for a restarted service")
	return d
}

// measured returns how much of the session's arenas is resident. It leaves out arenas
// that cannot be measured.
func (s *session) measured() ledger.Device {
	of := s.document.Of()
	d := ledger.HostMemory(of.Rank)
	hold := func(component ledger.Component, a *arena.Arena) {
		if resident, err := a.Resident(); err == nil {
			d.Phases[0].Hold(ledger.Holding{Component: component, Part: of.SessionPart(), Bytes: resident})
		}
	}
	for i, plan := range s.plans {
		hold(plan.Component, s.contents.memory()[i])
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
