//go:build linux

package ghost

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/after/snapshot"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/simulate"
)

// Record is what a program did on the stage.
type Record struct {
	Torch string `json:"torch"`
	CUDA  string `json:"cuda"`
	Ranks int    `json:"ranks"`
	Rank  int    `json:"rank"`
	Steps int    `json:"steps"`
	// OnDevice is whether the GPU had what was trained.
	OnDevice bool `json:"on_device"`
	// LocalRanks are those of a node.
	LocalRanks int `json:"local_ranks"`
	// Device is the number of the GPU that the rank used; nil if it used none.
	Device *int `json:"device"`
	Phases []struct {
		Name string   `json:"name"`
		Step int      `json:"step"` // steps that were made before
		Time int64    `json:"time_us"`
		Host hostPart `json:"host"`
		// Outside is what stacks of Python held of devices, and did not take by PyTorch's allocator, when it was most.
		Outside []struct {
			Stack  int          `json:"stack"`
			Device int          `json:"device"`
			Bytes  ledger.Bytes `json:"bytes"`
		} `json:"outside"`
	} `json:"phases"`
	// HostStacks are stacks of Python that asked for memory of the host: file, function and line, the innermost first.
	HostStacks [][][3]string `json:"host_stacks"`
	// HostStates are those of them that made states of an optimizer.
	HostStates []int            `json:"host_states"`
	Known      []snapshot.Known `json:"known"`
	Notes      []Note           `json:"notes"`
	Unmodelled []struct {
		Name  string `json:"name"`
		Calls int64  `json:"calls"`
	} `json:"unmodelled"`
	// Workspaces is memory of the GPU that cuBLAS was given to work in.
	Workspaces []snapshot.Range `json:"workspaces"`
	// History are the files of the history of memory that were written before the last.
	History []string `json:"history"`
	End     struct {
		Kind    string `json:"kind"` // "enough", "ended", "failed", "more" or "unrecorded"
		Status  int    `json:"status"`
		Type    string `json:"type"`
		Message string `json:"message"`
		GPUs    int    `json:"gpus"` // of a launch on more of them than there were
		Nodes   int    `json:"nodes"`
		Place   string `json:"place"` // "file:line: text" of the program that failed
		// Missing are data sets and tokenizers that the program asked for, and that are not here.
		Missing []string `json:"missing"`
	} `json:"end"`
	Allocated    ledger.Bytes `json:"allocated_bytes"`
	Reserved     ledger.Bytes `json:"reserved_bytes"`
	Retries      int64        `json:"retries"`
	Failures     int64        `json:"failures"`
	Waits        int64        `json:"waits"` // how often memory was not free yet, as another stream used it
	ResidentPeak ledger.Bytes `json:"resident_peak_bytes"`

	// GPU is what the rank's GPU held.
	GPU ledger.Device `json:"-"`
	// Host is what its process held.
	Host []hostPhase `json:"-"`
	// AsItWas is the replay of the trace under the settings that it was recorded under, and Replays are those of the
	// request. Where the two differ from what PyTorch reserved, compare them with each other.
	AsItWas Replay   `json:"-"`
	Replays []Replay `json:"-"`
}

// Replay is what the allocator would have reserved with other settings.
type Replay struct {
	Settings string
	Reserved ledger.Bytes // at most
}

// Note is something that the stage did otherwise than a real run would, or guessed.
type Note struct {
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// maxRecord is far above the size of any record.
const maxRecord = 64 << 20

// readRecord reads what a program has left in the scratch folder.
func readRecord(scratch string, of Request) (*Record, error) {
	text, err := files.Read(filepath.Join(scratch, "record.json"), maxRecord)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fault.Inputf("the program ended before it could be recorded").
			WithHint("its output says why")
	}
	if err != nil {
		return nil, err
	}
	r := &Record{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, spoilt("%v", err)
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	switch r.End.Kind {
	case "unrecorded":
		return nil, fault.Inputf("the program ran, and what it held cannot be recorded: %s: %s", r.End.Type,
			r.End.Message)
	case "more":
		return r, nil
	}
	if refused := r.refused(of); refused != nil {
		return nil, refused
	}
	var parts []string
	for _, name := range append(r.History, snapshotName) {
		parts = append(parts, filepath.Join(scratch, name))
	}
	s, err := snapshot.OpenParts(parts...)
	if err != nil {
		return nil, err
	}
	accounts, err := r.accounts()
	if err != nil {
		return nil, err
	}
	r.accountHost(accounts)
	return r, r.account(s, of, accounts)
}

// spoilt is for records that the stage does not write: the program has changed them, or what the stage counts.
func spoilt(format string, arguments ...any) error {
	return fault.Inputf("the record of the program cannot be read: "+format, arguments...).
		WithHint("see whether the program itself writes to its folder for temporary files (TMPDIR)")
}

// Limits of what a record says, far above any job: sums of these do not overflow.
const (
	mostRanks = 1 << 20
	mostLocal = 1 << 10       // ranks of a node
	mostBytes = 1 << 50       // that a rank holds
	mostSteps = math.MaxInt32 // of any kind
)

// check refuses numbers that no program has.
func (r *Record) check() error {
	type number struct {
		name        string
		value, most int64
	}
	numbers := []number{{"ranks", int64(r.Ranks), mostRanks}, {"rank", int64(r.Rank), max(0, int64(r.Ranks)-1)},
		{"local_ranks", int64(r.LocalRanks), mostLocal}, {"steps", int64(r.Steps), mostSteps},
		{"end.gpus", int64(r.End.GPUs), mostLocal}, {"end.nodes", int64(r.End.Nodes), mostRanks},
		{"end.status", int64(r.End.Status), mostSteps}, {"allocated_bytes", int64(r.Allocated), mostBytes},
		{"reserved_bytes", int64(r.Reserved), mostBytes},
		{"retries", r.Retries, mostSteps}, {"failures", r.Failures, mostSteps}, {"waits", r.Waits, mostSteps}}
	for _, name := range r.History {
		if name != filepath.Base(name) || name == ".." {
			return spoilt("history names %q, which is not in the folder", name)
		}
	}
	for i, p := range r.Phases {
		sum := p.Host.Process + p.Host.Children
		name := fmt.Sprintf("phases[%d].", i)
		numbers = append(numbers, number{name + "step", int64(p.Step), mostSteps},
			number{name + "host.process_bytes", int64(p.Host.Process), mostBytes},
			number{name + "host.children_bytes", int64(p.Host.Children), mostBytes})
		for _, h := range p.Host.Held {
			numbers = append(numbers, number{name + "host.held.stack", int64(h.Stack), int64(len(r.HostStacks)) - 1},
				number{name + "host.held.pageable_bytes", int64(h.Pageable), mostBytes},
				number{name + "host.held.pinned_bytes", int64(h.Pinned), mostBytes},
				number{name + "host.held.managed_bytes", int64(h.Managed), mostBytes})
			sum = min(sum, mostBytes) + min(h.Pageable, mostBytes) + min(h.Pinned, mostBytes) +
				min(h.Managed, mostBytes)
		}
		var outside ledger.Bytes
		for _, h := range p.Outside {
			numbers = append(numbers, number{name + "outside.stack", int64(h.Stack), int64(len(r.HostStacks)) - 1},
				number{name + "outside.bytes", int64(h.Bytes), mostBytes})
			outside = min(outside, mostBytes) + min(h.Bytes, mostBytes)
		}
		numbers = append(numbers, number{name + "outside", int64(outside), mostBytes})
		numbers = append(numbers, number{name + "host", int64(sum), mostBytes})
	}
	for _, s := range r.HostStates {
		numbers = append(numbers, number{"host_states", int64(s), int64(len(r.HostStacks)) - 1})
	}
	for _, n := range numbers {
		if n.value < 0 || n.value > n.most {
			return spoilt("%s is %d: expected 0 to %d", n.name, n.value, n.most)
		}
	}
	return nil
}

// refused returns why there is no plan, if there is none. A program that ran out of memory has one.
func (r *Record) refused(of Request) error {
	switch {
	case r.End.Kind == "failed" && r.Failures == 0:
		return r.failed()
	case r.Torch == "":
		return fault.Inputf("the program did not import torch").WithHint("name the program that trains")
	case r.CUDA == "":
		return fault.Inputf("the program runs with torch %s, a build without CUDA, and would train on the CPU",
			r.Torch).WithHint("install a build of torch with CUDA beside it: it needs no GPU")
	case r.Device == nil:
		return fault.Inputf("the program ended%s and has used no GPU", r.status())
	case r.Failures > 0:
		return nil
	case r.Steps == 0:
		return fault.Inputf("the program ended%s without an optimizer step", r.status())
	case !r.OnDevice:
		return fault.Inputf("the program used a GPU, and trained on the CPU: no loss and no parameter was on the GPU").
			WithHint("see which device the program chooses for its model")
	case r.Steps < of.Steps && r.End.Status != 0:
		return fault.Inputf("the program ended%s after %d of %d optimizer steps", r.status(), r.Steps, of.Steps).
			WithHint("its output says why")
	case r.Steps < of.Steps:
		r.Notes = append(r.Notes, Note{"steps", fmt.Sprintf("the program ended after %d of %d optimizer steps: "+
			"the plan has no steady step", r.Steps, of.Steps)})
	}
	return nil
}

// failed is the error that the program ended with.
func (r *Record) failed() error {
	failed := fault.Inputf("the program failed: %s: %s", r.End.Type, r.End.Message)
	var hints []string
	if len(r.End.Missing) > 0 {
		hints = append(hints, fmt.Sprintf("%s not here: --data synthetic --seq-len 2048, for one, has such data "+
			"made up", isOrAre(r.End.Missing)))
	} else if offline.MatchString(r.End.Type + ": " + r.End.Message) {
		hints = append(hints, "programs are planned without a network: have what it fetches on this host")
	}
	if r.End.Place != "" {
		hints = append(hints, "see "+r.End.Place)
	}
	return failed.WithHint(strings.Join(hints, "; "))
}

func isOrAre(what []string) string {
	if len(what) == 1 {
		return what[0] + " is"
	}
	return strings.Join(what[:len(what)-1], ", ") + " and " + what[len(what)-1] + " are"
}

// offline recognizes errors of programs that look for a network.
var offline = regexp.MustCompile(`name resolution|URLError|ConnectionError|Network is unreachable|` +
	`LocalEntryNotFoundError|OfflineModeIsEnabled|MaxRetryError|ConnectError`)

// status is how the program ended, if that was no success.
func (r *Record) status() string {
	if r.End.Status == 0 {
		return ""
	}
	return fmt.Sprintf(" with status %d", r.End.Status)
}

// account makes the GPU's part of the ledger.
func (r *Record) account(s *snapshot.Snapshot, of Request, accounts []snapshot.Account) error {
	devices, err := s.Devices()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(devices, func(d *snapshot.Device) bool { return d.Number == *r.Device })
	if at < 0 {
		return fault.Inputf("the program has allocated nothing on its GPU")
	}
	d := devices[at]
	d.Assign(ledger.MatmulWorkspaces, r.Workspaces)
	d.Tell(r.Known)
	r.GPU = ledger.Device{Kind: ledger.GPU, Name: of.GPU.Name, Rank: r.Rank, Count: max(1, r.Ranks),
		Capacity: of.GPU.Memory}
	torch, err := version.Parse(r.Torch)
	if err != nil {
		return err
	}
	r.GPU.Outside = simulate.Outside(torch, of.GPU.Capability, r.Ranks)
	var outside ledger.Bytes
	for _, h := range r.GPU.Outside {
		outside += h.Bytes
	}
	all := r.spans(d)
	rounding := r.rounding(all)
	for _, p := range all {
		made := ledger.Phase{
			Name: p.name, Iteration: p.iteration,
			PeakRequested: p.Requested, PeakAllocated: p.Requested + rounding, PeakReserved: p.Reserved,
			PeakUsed: p.Reserved + outside, EndRequested: p.EndRequested, EndAllocated: p.EndRequested,
			EndReserved: p.EndReserved, Components: componentsOf(d, p.Peak),
		}
		if h := r.outsideTorch(p, accounts); h.Bytes > 0 {
			made.Components = append(made.Components, h)
			made.PeakUsed += h.Bytes
		}
		r.GPU.Phases = append(r.GPU.Phases, made)
	}
	peak := r.GPU.Peak().PeakUsed
	r.GPU.Interval = ledger.Interval{Lower: peak, Upper: peak, Confidence: ledger.Confidence,
		Sources: []ledger.Source{}}
	for _, h := range r.GPU.Outside {
		below, above, why := simulate.Apart(h)
		plan.Widen(&r.GPU, ledger.Source{Name: h.Component.Title(), Below: below, Above: above, Reason: why})
	}
	return r.replay(s, d, of.WhatIf)
}

// outsideTorch returns what the GPU held in a phase that PyTorch's allocator did not take, in the part where that was
// most: libraries call CUDA themselves.
func (r *Record) outsideTorch(p phase, accounts []snapshot.Account) ledger.Holding {
	most := ledger.Holding{Component: ledger.OutsideTorch}
	for i, part := range r.Phases {
		if name, iteration := r.named(i); name != p.name || iteration != p.iteration || part.Name == "over" {
			continue
		}
		sums := map[string]ledger.Bytes{}
		var sum ledger.Bytes
		for _, h := range part.Outside {
			if h.Device == *r.Device {
				sums[accounts[h.Stack].Place] += h.Bytes
				sum += h.Bytes
			}
		}
		if sum > most.Bytes {
			places := slices.SortedFunc(maps.Keys(sums), func(a, b string) int {
				return cmp.Or(cmp.Compare(sums[b], sums[a]), cmp.Compare(a, b))
			})
			most.Bytes, most.Why = sum, whyOf(places[0], sums[places[0]], len(places))
		}
	}
	return most
}

// whyOf names the line that holds most of a component, and how many lines hold some.
func whyOf(place string, bytes ledger.Bytes, lines int) string {
	why := fmt.Sprintf("%s (%v)", place, bytes)
	if lines > 1 {
		why += fmt.Sprintf(", and %d more lines", lines-1)
	}
	return why
}

// replay runs the trace through an allocator with other settings.
func (r *Record) replay(s *snapshot.Snapshot, d *snapshot.Device, others []string) error {
	if len(others) == 0 {
		return nil
	}
	own, err := s.Configuration()
	if err != nil {
		return err
	}
	under := func(text string, c allocator.Configuration) (Replay, error) {
		replayed, err := d.Replay(c, snapshot.NoEmptyCache)
		return Replay{text, replayed.PeakReserved}, err
	}
	if r.AsItWas, err = under(s.Settings.Configuration, own); err != nil {
		return err
	}
	for _, text := range others {
		c, err := snapshot.ParseSettings(text)
		if err != nil {
			return err
		}
		replayed, err := under(text, c)
		if err != nil {
			return err
		}
		r.Replays = append(r.Replays, replayed)
	}
	return nil
}

// rounding is what blocks take beyond what was requested. PyTorch's own count of what is requested has blocks that were
// given back while another stream uses them, and that of what is allocated has not: the trace says what was requested.
func (r *Record) rounding(all []phase) ledger.Bytes {
	var requested ledger.Bytes
	for _, p := range all {
		requested = max(requested, p.Requested)
	}
	return max(0, r.Allocated-requested)
}

// phase is a phase of the ledger, and what was held in it.
type phase struct {
	snapshot.Span
	name      ledger.PhaseName
	iteration ledger.Iteration
}

// spans returns the phases of a device. Parts of one phase are one, as the passes of micro batches are. What lies
// between a backward pass and the step, as clipping, belongs to the step.
func (r *Record) spans(d *snapshot.Device) []phase {
	var times []int64
	for _, p := range r.Phases {
		times = append(times, p.Time)
	}
	var all []phase
	for i, span := range d.Spans(times) {
		if i > 0 && r.Phases[i-1].Name == "over" {
			break
		}
		next := phase{span, ledger.Load, ledger.Once}
		if i > 0 {
			next.name, next.iteration = r.named(i - 1)
		}
		at := slices.IndexFunc(all, func(p phase) bool { return p.name == next.name && p.iteration == next.iteration })
		if at < 0 {
			all = append(all, next)
		} else {
			all[at].Span = joined(all[at].Span, next.Span)
		}
	}
	return all
}

// named returns the phase that a part of the record belongs to.
func (r *Record) named(i int) (ledger.PhaseName, ledger.Iteration) {
	p := r.Phases[i]
	iteration := ledger.First
	if p.Step > 0 {
		iteration = ledger.Steady
	}
	switch p.Name {
	case "load":
		return ledger.Load, ledger.Once
	case "forward":
		return ledger.Forward, iteration
	case "backward":
		return ledger.Backward, iteration
	case "between":
		if i > 0 && r.Phases[i-1].Step == 0 {
			iteration = ledger.First // the step before it was the first
		}
		if i > 0 && i+1 < len(r.Phases) && r.Phases[i-1].Name == "backward" && r.Phases[i+1].Name == "forward" &&
			r.Phases[i-1].Step == r.Phases[i+1].Step {
			return ledger.Backward, iteration // of a batch that is not the last of its step
		}
	}
	return ledger.Step, iteration
}

func joined(a, b snapshot.Span) snapshot.Span {
	if b.Requested > a.Requested {
		a.Peak, a.Requested = b.Peak, b.Requested
	}
	a.Reserved = max(a.Reserved, b.Reserved)
	a.EndRequested, a.EndReserved = b.EndRequested, b.EndReserved
	return a
}

// componentsOf returns what was held after an entry, by component, with the lines that asked for most of it.
func componentsOf(d *snapshot.Device, entry int) []ledger.Holding {
	holders := d.Holders(entry)
	var all []ledger.Holding
	for _, sum := range snapshot.ByComponent(holders) {
		h := ledger.Holding{Component: sum.Component, Bytes: sum.Bytes}
		places := slices.DeleteFunc(slices.Clone(holders), func(x snapshot.Holder) bool {
			return x.Component != sum.Component
		})
		slices.SortStableFunc(places, func(a, b snapshot.Holder) int { return cmp.Compare(b.Bytes, a.Bytes) })
		place := strings.Replace(places[0].Place, snapshot.NoPlace, "autograd", 1)
		h.Why = whyOf(place, places[0].Bytes, len(places))
		all = append(all, h)
	}
	return all
}
