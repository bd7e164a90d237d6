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

// StatSchema is the schema of [Overview].
const StatSchema = "plimsoll.stat/2"

// Overview is the status of a service, as plimsoll stat shows it.
type Overview struct {
	Schema   string  `json:"schema"`
	Service  string  `json:"service"` // its version
	Process  int     `json:"process"`
	Seconds  float64 `json:"seconds"` // since the start
	Restarts int     `json:"restarts"`
	Kernel   string  `json:"kernel"`
	Job      string  `json:"job"`
	Requests int64   `json:"requests"`
	Refused  int64   `json:"requests_refused"`
	Clients  int     `json:"clients"`
	// Unanswered counts the requests that are being handled. QueuedBytes is the size of
	// the requests that have arrived and were not read yet.
	Unanswered  int64           `json:"requests_unanswered"`
	QueuedBytes ledger.Bytes    `json:"requests_queued_bytes"`
	Sessions    []SessionStatus `json:"sessions"`
	// SetAside are the sessions of an earlier service that this one could not restore.
	// Their memory is kept.
	SetAside []SetAside `json:"set_aside"`
	// Ledger has every arena of every session, and what else the process holds.
	Ledger ledger.Comparison `json:"ledger"`
}

// SessionStatus is the status of a session.
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
	Client      int64        `json:"client"` // its process; 0 for none
	Initialized bool         `json:"initialized"`
	Step        int64        `json:"step"` // the last finished step
	Saving      bool         `json:"saving"`
	SavedStep   int64        `json:"saved_step"`
	StateBytes  ledger.Bytes `json:"state_bytes"`
	// TrafficBytes is how much the update of one step moves.
	TrafficBytes ledger.Bytes `json:"traffic_bytes"`
	// These count the steps that this service made itself.
	StepsMade       int64   `json:"steps_made"`
	StepSeconds     float64 `json:"step_seconds"`      // of all steps
	LastStepSeconds float64 `json:"last_step_seconds"` // of the last step
	LastNormSeconds float64 `json:"last_norm_seconds"`
}

// SetAside is a session that could not be restored. Fields that could not be read are
// empty.
type SetAside struct {
	Name   string       `json:"name"` // for plimsoll restore
	Job    string       `json:"job"`
	Rank   int          `json:"rank"`
	Part   string       `json:"part"`
	Bytes  ledger.Bytes `json:"bytes"`
	Reason string       `json:"reason"`
}

// status returns the status of a session that was set aside.
func (l *leftSession) status() SetAside {
	status := SetAside{Name: l.name, Bytes: l.bytes(), Reason: l.reason.Error()}
	if l.document != nil {
		status.Job, status.Rank, status.Part = l.document.Job, l.document.Rank, l.document.Part
	}
	return status
}

// Overview returns the status of the service.
func (s *Server) Overview() *Overview {
	s.mu.Lock()
	status := &Overview{
		Schema: StatSchema, Service: s.version, Process: os.Getpid(), Seconds: time.Since(s.began).Seconds(),
		Restarts: s.given.Restarts, Kernel: s.kernel.String(), Job: s.job,
		Requests: s.requests.Load(), Refused: s.refused.Load(), Clients: len(s.open),
		Sessions: []SessionStatus{}, SetAside: []SetAside{},
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
		return cmp.Or(a.document.Rank-b.document.Rank, cmp.Compare(a.document.partOfSession(),
			b.document.partOfSession()))
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

func (s *session) status() SessionStatus {
	config := s.shard.Config()
	seconds := func(nanoseconds int64) float64 { return time.Duration(nanoseconds).Seconds() }
	return SessionStatus{
		Rank: config.Rank, Part: config.Part, Optimizer: s.document.Optimizer,
		State: s.document.State, Moments: s.document.Moments, Parameter: s.document.Parameter,
		Gradient: s.document.Gradient,
		Elements: config.Elements, CPUs: config.CPUs, Client: s.holder.Load(), Initialized: s.record.initialized(),
		Step: s.shard.Steps(), Saving: s.written.Load() != nil, SavedStep: s.savedStep.Load(),
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
	hold(ledger.SessionHeader, s.record.Mapped(),
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
	hold(ledger.SessionHeader, s.record.Arena)
	return d
}

// own returns what the service's process holds beside its arenas, or nothing if /proc
// cannot be read.
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
