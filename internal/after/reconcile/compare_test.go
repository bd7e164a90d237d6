package reconcile

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// sharedSample is of two ranks whose states lie in arenas that the service maps, too.
func sharedSample() samples.Record {
	const gib, mib = ledger.GiB, ledger.MiB
	process := func(pid, rank int, role samples.Role, anonymous ledger.Bytes,
		mappings ...samples.Mapping) samples.Process {
		p := samples.Process{PID: pid, Rank: rank, Role: role, Phase: ledger.Step, Iteration: ledger.Steady, Step: 3,
			PageTables: 4 * mib, Mappings: mappings}
		p.Resident.Anonymous, p.Proportional.Anonymous = anonymous, anonymous
		for _, m := range mappings {
			if m.Kind == samples.FileMapping {
				p.Resident.File += m.Resident
				p.Proportional.File += m.Proportional
			} else {
				p.Resident.Shared += m.Resident
				p.Proportional.Shared += m.Proportional
			}
		}
		return p
	}
	half := func(rank string, component ledger.Component) samples.Mapping {
		return samples.Mapping{Name: "/memfd:plimsoll/" + rank + "/bf16/" + string(component), Arena: component,
			Part: "bf16", Kind: samples.SharedMapping, Resident: 2 * gib, Proportional: gib}
	}
	torch := samples.Mapping{Name: "/usr/lib/libtorch.so", Kind: samples.FileMapping, Resident: 400 * mib,
		Proportional: 200 * mib}
	weights := samples.Mapping{Name: "/data/model.safetensors", Kind: samples.FileMapping, Resident: 3 * gib,
		Proportional: 3 * gib}
	return samples.Record{Time: time.Second, Sample: &samples.Sample{Processes: []samples.Process{
		process(10, 0, samples.RankProcess, 5*gib, half("rank0", ledger.ExpAvg), torch, weights),
		process(11, 1, samples.RankProcess, 5*gib, half("rank1", ledger.ExpAvg), torch),
		process(12, 1, samples.Child, gib),
		process(13, samples.NoRank, samples.Service, 50*mib, half("rank0", ledger.ExpAvg),
			half("rank1", ledger.ExpAvg)),
		process(14, samples.NoRank, samples.Keeper, 20*mib),
	}}}
}

// sharedRun is a run with that sample.
func sharedRun() *Recording {
	const gib, mib = ledger.GiB, ledger.MiB
	ended := &samples.Ended{Phase: ledger.Step, Iteration: ledger.Steady, Step: 3, Resident: 10 * gib,
		Peak: 5*gib + 2*gib + 400*mib + 3*gib + 100*mib, PeakFreeHeap: 300 * mib,
		Holdings: []ledger.Holding{{Component: ledger.PythonProcess, Bytes: 900 * mib},
			{Component: ledger.Parameters, Bytes: 4 * gib}, {Component: ledger.ExpAvg, Bytes: 2 * gib}}}
	return &Recording{
		Start:   samples.Start{Schema: samples.Schema, Host: samples.Host{Memory: 64 * gib}},
		Samples: compacted(sharedSample()),
		Marks: []samples.Record{{Time: 2 * time.Second, Mark: &samples.Mark{PID: 10, Source: samples.FromClient,
			Ended: ended}}},
	}
}

// held returns what a device holds of each component in its only phase.
func heldIn(devices []ledger.Device, rank int) map[ledger.Component]ledger.Bytes {
	found := map[ledger.Component]ledger.Bytes{}
	for _, d := range devices {
		if d.Rank == rank && d.Kind == ledger.Host {
			for _, h := range d.Phases[0].Components {
				found[h.Component] += h.Bytes
			}
		}
	}
	return found
}

// TestMeasured has arenas that two processes map, a client's holdings in arenas, page cache and children.
func TestMeasured(t *testing.T) {
	const gib, mib = ledger.GiB, ledger.MiB
	c := Compare(sharedRun(), nil)
	for rank, want := range map[int]map[ledger.Component]ledger.Bytes{
		0: {ledger.PythonProcess: 700 * mib, ledger.Parameters: 4 * gib, ledger.ExpAvg: 2 * gib,
			ledger.PageTables: 4 * mib, ledger.FreeHeap: 300 * mib, ledger.UnexplainedAnonymous: 324 * mib},
		1: {ledger.PythonProcess: 200 * mib, ledger.ExpAvg: 2 * gib, ledger.PageTables: 4 * mib,
			ledger.ChildProcesses: gib + 4*mib, ledger.UnexplainedAnonymous: 5 * gib},
		ledger.WholeNode: {ledger.PythonProcess: 900 * mib, ledger.Parameters: 4 * gib, ledger.ExpAvg: 4 * gib,
			ledger.PageTables: 8 * mib, ledger.FreeHeap: 300 * mib, ledger.ChildProcesses: gib + 4*mib,
			ledger.UnexplainedAnonymous: 5*gib + 324*mib, ledger.ServiceProcess: 50 * mib,
			ledger.ServicePageTables: 4 * mib, ledger.Process: 24 * mib},
	} {
		got := heldIn(c.Measured, rank)
		for component := range got {
			if _, known := want[component]; !known {
				t.Errorf("rank %d holds %v of %s", rank, got[component], component)
			}
		}
		for component, bytes := range want {
			if got[component] != bytes {
				t.Errorf("rank %d holds %v of %s, want %v", rank, got[component], component, bytes)
			}
		}
	}
	for _, p := range c.Peaks {
		if p.Rank == 0 && (p.Source != FromMarks || p.PageCache != 3*gib || p.Unexplained != 324*mib) {
			t.Errorf("the peak of rank 0 is %+v", p)
		}
		if p.Rank == 1 && p.Source != FromSamples {
			t.Errorf("the peak of rank 1 is %+v", p)
		}
	}
}

// TestCompareWithPlan compares with a plan of two ranks on the node.
func TestCompareWithPlan(t *testing.T) {
	device := ledger.Device{Kind: ledger.Host, Count: 1, Phases: []ledger.Phase{{Name: ledger.Step,
		Iteration: ledger.Steady, PeakUsed: 20 * ledger.GiB, Components: []ledger.Holding{
			{Component: ledger.OptimizerStates, Bytes: 4 * ledger.GiB},
			{Component: ledger.Parameters, Bytes: 8 * ledger.GiB}}}},
		Outside: []ledger.Holding{{Component: ledger.PythonProcess, Bytes: 2 * ledger.GiB}}}
	c := Compare(sharedRun(), &Plan{Devices: []ledger.Device{device}, RanksPerNode: 2})
	node, rank := 0, 0
	for _, p := range c.Peaks {
		switch {
		case p.Rank == ledger.WholeNode && *p.Planned == 20*ledger.GiB:
			node++
		case p.Rank >= 0 && *p.Planned == 10*ledger.GiB:
			rank++
		default:
			t.Errorf("peak %+v", p)
		}
	}
	if node != 1 || rank != 2 {
		t.Errorf("%d peaks of the node and %d of ranks: %+v", node, rank, c.Peaks)
	}
	sum := func(keep func(ledger.Line) bool) ledger.Bytes { return c.Lines.Planned(keep) }
	if got := sum(func(l ledger.Line) bool { return l.Rank == ledger.WholeNode }); got != 20*ledger.GiB {
		t.Errorf("the planned lines of the node add up to %v", got)
	}
	for _, l := range c.Lines {
		if l.Rank == ledger.WholeNode && l.Component == ledger.OptimizerStates &&
			(l.Planned != 4*ledger.GiB || *l.Measured != 4*ledger.GiB) {
			t.Errorf("exp_avg is no part of the optimizer states: %+v", l)
		}
	}
	if f := c.Farthest(); f == nil || f.Rank == ledger.WholeNode && f.Planned == nil {
		t.Errorf("farthest: %+v", f)
	}
	// Another number of ranks is no plan of this node.
	c = Compare(sharedRun(), &Plan{Devices: []ledger.Device{device}, RanksPerNode: 4})
	if len(c.Notes) != 1 || c.Peaks[0].Planned != nil {
		t.Errorf("%q, %+v", c.Notes, c.Peaks)
	}
}

// TestGPU compares torch's and the driver's numbers.
func TestGPU(t *testing.T) {
	const gib, mib = ledger.GiB, ledger.MiB
	r := sharedRun()
	r.Samples[0].GPUs = []samples.GPU{{Processes: []samples.GPUProcess{{PID: 10, Used: 12 * gib}}}}
	r.Marks[0].Mark.Ended.GPUs = []samples.TorchMemory{{Allocated: 8 * gib, Reserved: 11 * gib, PeakAllocated: 9 * gib,
		PeakReserved: 11 * gib, Total: 80 * gib, Free: 60 * gib,
		Holdings: []ledger.Holding{{Component: ledger.Parameters, Bytes: 7 * gib}}}}
	plan := &Plan{RanksPerNode: 2, Devices: []ledger.Device{{Kind: ledger.GPU, Count: 2,
		Outside: []ledger.Holding{{Component: ledger.CUDAContext, Bytes: 400 * mib},
			{Component: ledger.NCCL, Bytes: 500 * mib}},
		Phases: []ledger.Phase{{Name: ledger.Step, Iteration: ledger.Steady, PeakUsed: 13 * gib,
			Components: []ledger.Holding{{Component: ledger.Parameters, Bytes: 7 * gib}}}}}}}
	c := Compare(r, plan)
	want := map[ledger.Component][2]ledger.Bytes{ledger.Parameters: {7 * gib, 7 * gib},
		ledger.UnexplainedGPU: {0, 2 * gib}, ledger.AllocatorReserve: {6*gib - 900*mib, 2 * gib},
		ledger.OutsideAllocator: {900 * mib, gib}}
	for _, l := range c.Lines {
		if l.Device != ledger.GPU {
			continue
		}
		if w := want[l.Component]; l.Planned != w[0] || l.Measured == nil || *l.Measured != w[1] {
			t.Errorf("%+v, want %v", l, w)
		}
		delete(want, l.Component)
	}
	if len(want) > 0 {
		t.Errorf("there are no lines of %v", want)
	}
}

// TestPeaksAreSums draws recordings: the components of every phase add up to its peak, whatever the sizes are.
func TestPeaksAreSums(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawn(t)
		c := Compare(r, nil)
		for _, rank := range r.Ranks() {
			for _, p := range r.peaks(r.moments(), rank) {
				var sum ledger.Bytes
				for _, h := range p.holdings() {
					sum += h.Bytes
				}
				if sum != p.need {
					t.Fatalf("%v of rank %d: %d in components, %d at the peak", p.stage, rank, sum, p.need)
				}
			}
		}
		for _, peak := range c.Peaks {
			if peak.Device == ledger.Host && peak.Source == FromSamples && *peak.Measured < 0 {
				t.Fatalf("%+v", peak)
			}
		}
	})
}

// drawn draws a recording of a few samples and marks.
func drawn(t *rapid.T) *Recording {
	size := rapid.Map(rapid.Int64Range(0, 1<<40), func(n int64) ledger.Bytes { return ledger.Bytes(n) })
	at := rapid.SampledFrom(stages)
	holdings := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) ledger.Holding {
		return ledger.Holding{Component: rapid.SampledFrom([]ledger.Component{ledger.Parameters, ledger.ExpAvg,
			ledger.PythonProcess}).Draw(t, "component"), Bytes: size.Draw(t, "bytes")}
	}), 0, 3)
	kinds := rapid.Custom(func(t *rapid.T) samples.Kinds {
		return samples.Kinds{Anonymous: size.Draw(t, "anonymous"), Shared: size.Draw(t, "shared"),
			File: size.Draw(t, "file"), Hugetlb: size.Draw(t, "hugetlb")}
	})
	mapping := rapid.Custom(func(t *rapid.T) samples.Mapping {
		names := rapid.SampledFrom([]string{"/memfd:plimsoll/rank1/x", "/a.so", "/b"})
		kinds := rapid.SampledFrom([]samples.MappingKind{samples.FileMapping, samples.SharedMapping})
		return samples.Mapping{Name: names.Draw(t, "name"),
			Arena:    rapid.SampledFrom([]ledger.Component{"", ledger.ExpAvg}).Draw(t, "arena"),
			Kind:     kinds.Draw(t, "kind"),
			Resident: size.Draw(t, "resident"), Proportional: size.Draw(t, "proportional")}
	})
	r := &Recording{}
	for i := range rapid.IntRange(0, 4).Draw(t, "samples") {
		s := &samples.Sample{}
		for pid := range rapid.IntRange(0, 4).Draw(t, "processes") {
			in := at.Draw(t, "stage")
			s.Processes = append(s.Processes, samples.Process{PID: pid, Rank: rapid.IntRange(-1, 1).Draw(t, "rank"),
				Role: rapid.SampledFrom([]samples.Role{samples.RankProcess, samples.Child, samples.Service,
					samples.Keeper}).Draw(t, "role"),
				Phase: in.phase, Iteration: in.iteration, Resident: kinds.Draw(t, "resident"),
				Proportional: kinds.Draw(t, "proportional"), PageTables: size.Draw(t, "page tables"),
				Mappings: rapid.SliceOfN(mapping, 0, 3).Draw(t, "mappings")})
		}
		r.Samples = append(r.Samples, compacted(samples.Record{Time: time.Duration(i), Sample: s})...)
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "marks") {
		in := at.Draw(t, "stage")
		r.Marks = append(r.Marks, samples.Record{Time: time.Duration(i), Mark: &samples.Mark{
			Rank: rapid.IntRange(0, 1).Draw(t, "rank"), Ended: &samples.Ended{Phase: in.phase, Iteration: in.iteration,
				Resident: size.Draw(t, "resident"), Peak: size.Draw(t, "peak"), PeakFreeHeap: size.Draw(t, "free"),
				Holdings: holdings.Draw(t, "holdings"), PeakHoldings: holdings.Draw(t, "peak holdings")}}})
	}
	return r
}

// FuzzCompare reads any recording and compares it with any plan.
func FuzzCompare(f *testing.F) {
	var text strings.Builder
	w := samples.NewWriter(&text)
	run := sharedRun()
	start := run.Start
	records := []samples.Record{{Start: &start}, sharedSample()}
	for _, r := range append(records, run.Marks...) {
		if err := w.Write(&r); err != nil {
			f.Fatal(err)
		}
	}
	plan, err := json.Marshal(run.measure().devices)
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(text.String()), plan, 2)
	f.Add([]byte(`{"time_ns":0,"start":{"schema":"plimsoll.samples/1"}}`+"\n"), []byte("[{}]"), 0)
	f.Fuzz(func(t *testing.T, recording, plan []byte, ranks int) {
		r, err := Read("run.jsonl", strings.NewReader(string(recording)))
		if err != nil {
			return
		}
		p := &Plan{RanksPerNode: ranks, Parameters: int64(ranks)}
		if json.Unmarshal(plan, &p.Devices) != nil {
			return
		}
		c := Compare(r, p)
		c.Farthest()
	})
}
