//go:build linux

package report

import (
	"cmp"
	"fmt"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/cycle"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/roads"
)

// compare sets the roads, and chooses one.
func (r *StatesRehearsal) compare(p *cycle.Placement, cpu CPURoad) error {
	link := roads.Link{In: cmp.Or(p.Link.In, r.CopyIn.speed()), Out: cmp.Or(p.Link.Out, r.CopyOut.speed())}
	for _, mode := range cycle.Modes() {
		road, err := p.States(mode, link)
		if err != nil {
			return err
		}
		f := newRehearsedRoad(roadOf[mode], road)
		if mode == p.Mode() && r.Median != nil {
			f.RehearsedSeconds = &r.Median.ExposedSeconds
		}
		r.Roads = append(r.Roads, f)
	}
	if cpu.Placement != nil {
		step := time.Duration(0)
		if cpu.Measurement != nil {
			step = time.Duration(r.CPU.StepSecondsMedian * float64(time.Second))
		}
		road, err := p.CPU(cpu.Placement, step, link)
		if err != nil {
			return err
		}
		r.Roads = append(r.Roads, newRehearsedRoad(plan.CPURoad, road))
	}
	r.choose(p, cpu)
	return nil
}

func newRehearsedRoad(name string, road cycle.Road) RehearsedRoad {
	f := RehearsedRoad{Road: name, HostBytes: road.Host, DeviceStepBytes: road.Window, DeviceRestBytes: road.Rest}
	if s := road.Step; s != nil {
		for to, value := range map[**float64]time.Duration{&f.CopyInSeconds: s.In, &f.UpdateSeconds: s.Update,
			&f.CopyOutSeconds: s.Out, &f.ExposedSeconds: s.Exposed} {
			seconds := value.Seconds()
			*to = &seconds
		}
	}
	return f
}

// choose names the road on which a trainer waits least.
func (r *StatesRehearsal) choose(p *cycle.Placement, cpu CPURoad) {
	states, host := r.road(roadOf[p.Mode()]), r.road(plan.CPURoad)
	switch {
	case host == nil:
		r.Road, r.Reason = states.Road, "Muon has no update by the CPU, as its matrix products need a GPU"
	case !cpu.Verdict.Fits:
		r.Road = states.Road
		r.Reason = fmt.Sprintf("the update by the CPU does not fit this host: it needs %v", cpu.Verdict.Needed)
	case p.Link.In == 0 || p.Link.Out == 0:
		r.Reason = "the speed of copies within this host is not that of a link: --link-in and --link-out decide"
	case states.ExposedSeconds == nil || host.ExposedSeconds == nil:
		r.Reason = "nothing was measured"
	case *states.ExposedSeconds < *host.ExposedSeconds:
		r.Road, r.Reason = states.Road, fmt.Sprintf("a trainer waits %s in a step, and %s for the CPU step, which "+
			"moves %s at %.1f GB/s", seconds(*states.ExposedSeconds), seconds(*host.ExposedSeconds),
			each(r.cpuBytes(), p.Parameters), float64(r.cpuBytes())/r.CPU.StepSecondsMedian/1e9)
	default:
		in, out := p.Moved()
		bytes, speed, where := in, p.Link.In, "to the device"
		if *states.CopyOutSeconds > *states.CopyInSeconds {
			bytes, speed, where = out, p.Link.Out, "back"
		}
		r.Road, r.Reason = plan.CPURoad, fmt.Sprintf("a trainer waits %s in a step, and %s for states, of which "+
			"the link moves %s %s at %.1f GB/s", seconds(*host.ExposedSeconds), seconds(*states.ExposedSeconds),
			each(bytes, p.Parameters/int64(p.Job.Ranks)), where, speed/1e9)
	}
}

// each describes bytes for parameters.
func each(bytes ledger.Bytes, parameters int64) string {
	return shortBytes(float64(bytes)/float64(parameters)) + " B/parameter"
}

// cpuBytes returns what a step by the CPU moves.
func (r *StatesRehearsal) cpuBytes() ledger.Bytes {
	perParameter := r.CPU.TrafficBytesPerParameter + float64(r.CPU.NormTrafficBytesPerParameter)
	return ledger.Bytes(perParameter * float64(r.CPU.Job.ParametersOnHost))
}

// road returns the figures of a road, or nil.
func (r *StatesRehearsal) road(name string) *RehearsedRoad {
	for i := range r.Roads {
		if r.Roads[i].Road == name {
			return &r.Roads[i]
		}
	}
	return nil
}

// roadsTable has a column for every road.
func (r *StatesRehearsal) roadsTable() *Table {
	t := &Table{Columns: []Column{{Title: "road"}}}
	for _, f := range r.Roads {
		t.with(Label, f.Road)
	}
	row := func(name string, cell func(RehearsedRoad) any) {
		cells := []any{name}
		for _, f := range r.Roads {
			cells = append(cells, cell(f))
		}
		t.add(cells...)
	}
	row("host memory", func(f RehearsedRoad) any { return f.HostBytes })
	row("device memory in a step", func(f RehearsedRoad) any { return f.DeviceStepBytes })
	row("device memory between steps", func(f RehearsedRoad) any { return f.DeviceRestBytes })
	for _, line := range []struct {
		name string
		of   func(RehearsedRoad) *float64
	}{
		{"copies to the device", func(f RehearsedRoad) *float64 { return f.CopyInSeconds }},
		{"update", func(f RehearsedRoad) *float64 { return f.UpdateSeconds }},
		{"copies back", func(f RehearsedRoad) *float64 { return f.CopyOutSeconds }},
		{"exposed, by the law", func(f RehearsedRoad) *float64 { return f.ExposedSeconds }},
		{"exposed, rehearsed here", func(f RehearsedRoad) *float64 { return f.RehearsedSeconds }},
	} {
		row(line.name, func(f RehearsedRoad) any {
			if value := line.of(f); value != nil {
				return seconds(*value)
			}
			return nil
		})
	}
	return t
}
