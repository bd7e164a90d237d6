package service

import (
	"cmp"
	"maps"
	"os"
	"slices"
	"time"

	"plimsoll/arena"
	"plimsoll/ledger"

	"github.com/prometheus/procfs"
)

// StatSchema is the schema of Overview.
const StatSchema = "plimsoll.stat/1"

// Overview is how a service is, as plimsoll stat shows it.
type Overview struct {
	Schema   string  `json:"schema"`
	Service  string  `json:"service"` // version
	Process  int     `json:"process"`
	Seconds  float64 `json:"seconds"` // since it was started
	Restarts int     `json:"restarts"`
	Kernel   string  `json:"kernel"`
	Job      string  `json:"job"`
	Requests int64   `json:"requests"`
	Refused  int64   `json:"requests_refused"`
	Clients  int     `json:"clients"`
	// Unanswered are the requests that are being handled, and QueuedBytes the size
	// of those that nobody has read yet.
	Unanswered  int64           `json:"requests_unanswered"`
	QueuedBytes ledger.Bytes    `json:"requests_queued_bytes"`
	Sessions    []SessionStatus `json:"sessions"`
	// SetAside are sessions that an earlier service has left and this one could not
	// restore. Their memory is kept.
	SetAside []SetAside `json:"set_aside"`
	// Ledger has every arena of every session, and what the process holds
	// beside them.
	Ledger ledger.Ledger `json:"ledger"`
}

// SessionStatus is how a session is.
type SessionStatus struct {
	Rank        int          `json:"rank"`
	Part        string       `json:"part"`
	Optimizer   string       `json:"optimizer"`
	State       string       `json:"state"`
	Moments     string       `json:"moments"`
	Parameter   string       `json:"parameter"`
	Gradient    string       `json:"gradient"`
	Elements    int64        `json:"elements"`
	CPUs        []int        `json:"cpus"`
	Client      int64        `json:"client"` // process; 0 for none
	Initialized bool         `json:"initialized"`
	Step        int64        `json:"step"` // the last that is finished
	Saving      bool         `json:"saving"`
	SavedStep   int64        `json:"saved_step"`
	StateBytes  ledger.Bytes `json:"state_bytes"`
	// TrafficBytes is what the update of a step moves.
	TrafficBytes ledger.Bytes `json:"traffic_bytes"`
	// Of the steps that this service has made itself.
	StepsMade       int64   `json:"steps_made"`
	StepSeconds     float64 `json:"step_seconds"`      // all together
	LastStepSeconds float64 `json:"last_step_seconds"` // of the last
	LastNormSeconds float64 `json:"last_norm_seconds"`
}

// SetAside is a session that could not be restored. What of it cannot be read is empty.
type SetAside struct {
	Name   string       `json:"name"` // by which it is restored or given back
	Job    string       `json:"job"`
	Rank   int          `json:"rank"`
	Part   string       `json:"part"`
	Bytes  ledger.Bytes `json:"bytes"`
	Reason string       `json:"reason"`
}

// status is how a session is that was set aside.
func (l *leftSession) status() SetAside {
	status := SetAside{Name: l.name, Bytes: l.bytes(), Reason: l.reason.Error()}
	if l.document != nil {
		status.Job, status.Rank, status.Part = l.document.Job, l.document.Rank, l.document.Part
	}
	return status
}

// What the service holds beside its arenas.
const (
	ComponentProcess    = "service_process"
	ComponentPageTables = "service_page_tables"
)

// Overview says how the service is.
func (s *Server) Overview() *Overview {
	s.mu.Lock()
	status := &Overview{
		Schema: StatSchema, Service: s.version, Process: os.Getpid(), Seconds: time.Since(s.began).Seconds(),
		Restarts: s.given.Restarts, Kernel: s.kernel.String(), Job: s.job,
		Requests: s.requests.Load(), Refused: s.refused.Load(), Clients: len(s.open),
		Sessions: []SessionStatus{}, SetAside: []SetAside{}, Ledger: ledger.Ledger{},
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
		return cmp.Or(a.document.Rank-b.document.Rank, cmp.Compare(a.document.Part, b.document.Part))
	})
	for _, session := range sessions {
		status.Sessions = append(status.Sessions, session.status())
		status.Ledger = append(status.Ledger, session.entries()...)
	}
	s.mu.Unlock()
	status.Ledger = append(status.Ledger, own()...)
	return status
}

func (s *session) status() SessionStatus {
	config := s.shard.Config()
	seconds := func(nanoseconds int64) float64 { return time.Duration(nanoseconds).Seconds() }
	return SessionStatus{
		Rank: config.Rank, Part: config.Part, Optimizer: s.document.Optimizer,
		State: s.document.State, Moments: s.document.Moments, Parameter: s.document.Parameter, Gradient: s.document.Gradient,
		Elements: config.Elements, CPUs: config.CPUs, Client: s.holder.Load(), Initialized: s.record.initialized(),
		Step: s.shard.Steps(), Saving: s.written.Load() != nil, SavedStep: s.savedStep.Load(),
		StateBytes: config.StateBytes(), TrafficBytes: config.TrafficBytes(),
		StepsMade: s.stepsMade.Load(), StepSeconds: seconds(s.busyTime.Load()),
		LastStepSeconds: seconds(s.lastStep.Load()), LastNormSeconds: seconds(s.lastNorm.Load()),
	}
}

// entries are the arenas of a session, as they were planned and as they are.
func (s *session) entries() ledger.Ledger {
	var entries ledger.Ledger
	config := s.shard.Config()
	entry := func(a *arena.Arena, component string, size ledger.Bytes, why string) {
		e := ledger.Entry{
			Device: ledger.Host, Rank: config.Rank, Phase: ledger.Step,
			Component: config.Part + "/" + component, Planned: size, Why: why,
		}
		if resident, err := a.Resident(); err == nil {
			e.Measured = &resident
		}
		entries = append(entries, e)
	}
	for i, plan := range config.Arenas() {
		entry(s.shard.Arenas()[i], plan.Component, config.Pages.Round(plan.Size), plan.Why)
	}
	entry(s.record.Arena, recordComponent, s.record.Mapped(), "what the session is: the document of the open request, and the hyperparameters of the step that is prepared, for a service that comes after this one")
	return entries
}

// own is what this process holds beside its arenas, which are memory that it
// shares.
func own() ledger.Ledger {
	process, err := procfs.Self()
	if err != nil {
		return nil // it is not measured, and the ledger does not have it
	}
	status, err := process.NewStatus()
	if err != nil {
		return nil
	}
	entry := func(component string, size uint64, why string) ledger.Entry {
		measured := ledger.Bytes(size)
		return ledger.Entry{
			Device: ledger.Host, Rank: ledger.WholeNode, Phase: ledger.Step, Component: component, Measured: &measured, Why: why,
		}
	}
	return ledger.Ledger{
		entry(ComponentProcess, status.RssAnon+status.RssFile, "the program itself: its text, heap and stacks"),
		entry(ComponentPageTables, status.VmPTE, "what the kernel needs to map the arenas: 8 B a page, in the service and in each trainer"),
	}
}
