//go:build linux

package ghost

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/simulate"
)

// Job is what the ranks of a program did that were played: the first, and the last where there are several. The last
// has the last stage of a pipeline, and the smallest of uneven shards.
type Job struct {
	First *Record
	Last  *Record // nil if the job has one rank
	// Failed is how the program ran out of memory, in PyTorch's own words; empty if it did not.
	Failed string
	Notes  []Note

	model gpu.Model
}

// Play plays a job.
func (r Request) Play(ctx context.Context) (*Job, error) {
	ctx, cancel := context.WithCancel(ctx)
	alone := r.GPUs*r.Nodes == 1
	if r.host == nil {
		r.host = newBudget(r.HostLimit)
	}
	r.name = "first"
	last := r
	last.Rank, last.Output, last.WhatIf, last.Keep, last.name = lastRank, io.Discard, nil, nil, "last"
	names := []string{r.name, last.name}
	if alone {
		names = names[:1]
	}
	mailbox, err := newMailbox(names...)
	if err != nil {
		cancel()
		return nil, err
	}
	defer mailbox.close()
	defer cancel()
	r.mailbox, last.mailbox = mailbox, mailbox
	mailbox.serve(ctx, r)
	var other result
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if !alone { // so that the two run side by side
			other = last.runOut(ctx)
		}
	}()
	first := r.runOut(ctx)
	if first.err != nil {
		cancel()
	}
	<-ended
	if first.err != nil {
		return nil, first.err
	}
	if alone && first.record.Ranks > 1 { // a launcher's file says so
		other = last.runOut(ctx)
	}
	if first.record.Waits > 0 {
		r.Early, r.Output, r.WhatIf, r.Keep = true, io.Discard, nil, nil
		if early := r.runOut(ctx); early.err == nil {
			first.record.widenBelow(early.record)
		}
	}
	j := &Job{First: first.record, Failed: first.failed, model: r.GPU,
		Notes: slices.Concat(first.record.Notes, mailbox.notes())}
	switch {
	case other.err != nil && first.record.Ranks > 1:
		j.Notes = append(j.Notes, Note{"ranks", fmt.Sprintf("the last rank was not played: %v", other.err)})
	case other.record != nil && other.record.Rank > 0:
		j.Last, j.Failed = other.record, cmp.Or(j.Failed, other.failed)
	}
	return j, nil
}

// widenBelow widens the interval of a GPU that was as late as can be by what it held when it did its work at once.
func (r *Record) widenBelow(early *Record) {
	late, soon := r.GPU.Peak().PeakUsed, early.GPU.Peak().PeakUsed
	if soon < late {
		plan.Widen(&r.GPU, ledger.Source{Name: "memory of other streams", Below: late - soon,
			Reason: "memory that another stream uses is free when its work is done: as late as the program can know, " +
				"or at once"})
	}
}

// Played returns the ranks that were played.
func (j *Job) Played() []int {
	if j.Last == nil {
		return []int{j.First.Rank}
	}
	return []int{j.First.Rank, j.Last.Rank}
}

// result is how a run ended.
type result struct {
	record *Record
	failed string
	err    error
}

// runOut runs a program. If it runs out of memory, it runs once more on GPUs that have enough: failed is how it failed,
// and the record says what it would have needed.
func (r Request) runOut(ctx context.Context) result {
	r.mailbox.began(r.name)
	defer r.mailbox.ended(r.name)
	record, err := r.Run(ctx)
	if err != nil || record.End.Kind != "failed" {
		return result{record, "", err}
	}
	failed, capacity := record.End.Message, r.GPU.Memory
	r.GPU.Memory = 0
	enough, err := r.Run(ctx)
	if err != nil {
		return result{nil, "", err}
	}
	if enough.End.Kind == "failed" {
		return result{nil, "", fault.Inputf("the program needs more than %v of one GPU: %s", unlimited(),
			enough.End.Message).WithHint("give it fewer layers, smaller batches or more ranks")}
	}
	enough.GPU.Capacity, enough.Retries = capacity, record.Retries
	return result{enough, failed, nil}
}

// alike is how much the peaks of two ranks may differ, as a part of them, that are shown as one.
const alike = 0.01

// Devices returns the GPUs of the ranks, and the host of the first node.
func (j *Job) Devices(hostMemory ledger.Bytes) []ledger.Device {
	gpus, nodes := j.gpus(), []ledger.Device{j.host(hostMemory)}
	plan.ShareMemory(j.model, max(1, j.First.LocalRanks), gpus, nodes)
	return append(gpus, nodes...)
}

// gpus returns the GPUs of the first and the last rank, or one where they are alike.
func (j *Job) gpus() []ledger.Device {
	first := j.First.GPU
	if j.Last == nil {
		return []ledger.Device{first}
	}
	last, ofFirst, ofLast := j.Last.GPU, first.Peak().PeakUsed, j.Last.GPU.Peak().PeakUsed
	if float64(max(ofFirst, ofLast)) > (1+alike)*float64(min(ofFirst, ofLast)) {
		first.Count, last.Count = 1, 1
		return []ledger.Device{first, last}
	}
	if ofLast > ofFirst {
		first = last
		first.Rank = 0
	}
	return []ledger.Device{first}
}

// host returns the memory of the first node: of its first rank, and of others like the last one.
func (j *Job) host(capacity ledger.Bytes) ledger.Device {
	local := max(1, j.First.LocalRanks)
	d := ledger.Device{Kind: ledger.Host, Name: "host", Count: max(1, j.First.Ranks/local), Capacity: capacity,
		Outside: []ledger.Holding{}}
	other := cmp.Or(j.Last, j.First)
	for _, p := range j.First.Host {
		sum := ledger.Phase{Name: p.name, Iteration: p.iteration}
		for _, h := range added(p.holdings, other.inPhase(p), local-1) {
			sum.Hold(h)
		}
		d.Phases = append(d.Phases, sum)
	}
	peak := d.Peak()
	d.Interval = ledger.Interval{Lower: peak.PeakUsed, Upper: peak.PeakUsed, Confidence: ledger.Confidence,
		Sources: []ledger.Source{}}
	for _, h := range peak.Components {
		if h.Component == ledger.PythonProcess {
			each := h
			each.Bytes /= ledger.Bytes(local)
			below, above, why := simulate.Apart(each)
			plan.Widen(&d, ledger.Source{Name: h.Component.Title(), Below: below * ledger.Bytes(local),
				Above: above * ledger.Bytes(local), Reason: why})
		}
	}
	return d
}

// added adds what one rank holds and what so many others hold.
func added(one, other []ledger.Holding, others int) []ledger.Holding {
	sum := slices.Clone(one)
	if others == 0 {
		return sum
	}
	for _, h := range other {
		h.Bytes *= ledger.Bytes(others)
		at := slices.IndexFunc(sum, func(x ledger.Holding) bool { return x.Component == h.Component })
		if at < 0 {
			h.Why = fmt.Sprintf("%d ranks: %s", others, h.Why)
			sum = append(sum, h)
			continue
		}
		sum[at].Bytes += h.Bytes
		sum[at].Why = fmt.Sprintf("%d ranks: %s", others+1, sum[at].Why)
	}
	return sum
}
