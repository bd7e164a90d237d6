package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
)

// brief is the plan on one screen: the verdict, what makes the job fit, the device that is nearest to its limit, and
// what to do next.
func (d *PlanDocument) brief(detail int) *Page {
	var job, largest, next Facts
	job.add("job", "%s on %s: %s, %s, %s", d.Model.Name, d.machine(), d.types(), d.batch(), d.Job.optimizer())
	d.Tier.addTo(&job, d.StepTime)
	d.notCounted(&job)
	device := d.limiting()
	largest.add("largest", "%s", largestOf(device))
	if d.Applied != nil {
		next = append(next, d.Applied.facts()...)
	}
	next.add("next", "%s", d.next())
	hints := append(d.stops(), d.unjudged()...)
	bars := Bars{Device: device, palette: paletteOf(d.Devices), most: min(max(2, detail-2), 8)}
	return &Page{
		Sections: []Section{append(Section{job}, rungs(d.Ladder, max(2, detail), false)...), {bars, largest, next}},
		Verdict:  d.verdictLine(),
		Tone:     d.tone(),
		Hints:    hints,
		Document: d,
	}
}

func (d *PlanDocument) tone() Tone {
	return map[plan.Result]Tone{plan.Fits: Good, plan.Tight: Warning, plan.DoesNotFit: Bad}[d.Verdict]
}

// machine says the GPUs of the job.
func (d *PlanDocument) machine() string {
	name := "GPU"
	for i := range d.Devices {
		if d.Devices[i].Kind == ledger.GPU && d.Devices[i].Name != "" {
			name = d.Devices[i].Name
		}
	}
	switch {
	case !slices.ContainsFunc(d.Devices, func(d ledger.Device) bool { return d.Kind == ledger.GPU }):
		return "the CPU"
	case d.Job.Ranks == 1:
		return "one " + name
	case d.Job.Nodes > 1:
		return fmt.Sprintf("%d nodes of %d x %s, %s", d.Job.Nodes, d.Job.Ranks/d.Job.Nodes, name, d.Job.Engine)
	}
	return fmt.Sprintf("%d x %s, %s", d.Job.Ranks, name, d.Job.Engine)
}

// limiting returns the device that the verdict is about. Without a verdict that is the fullest GPU.
func (d *PlanDocument) limiting() *ledger.Device {
	found := &d.Devices[0]
	for i := range d.Devices {
		device := &d.Devices[i]
		switch {
		case d.Limit != nil && device.Kind == d.Limit.Device && device.Rank == d.Limit.Rank:
			return device
		case d.Limit == nil && device.Kind == ledger.GPU && device.Peak().PeakUsed > found.Peak().PeakUsed:
			found = device
		}
	}
	return found
}

// largestOf names the largest components at a device's peak.
func largestOf(device *ledger.Device) string {
	names, sums := largestAt(device)
	var parts []string
	for _, c := range names {
		parts = append(parts, fmt.Sprintf("%s %v", c.Title(), sums[c]))
	}
	return strings.Join(parts, ", ")
}

// largestAt returns the largest components at a device's peak, and the bytes of all.
func largestAt(device *ledger.Device) ([]ledger.Component, map[ledger.Component]ledger.Bytes) {
	const most = 3
	sums := map[ledger.Component]ledger.Bytes{}
	for _, h := range held(device, device.Peak()) {
		sums[wholeOf(h.Component)] += h.Bytes
	}
	names := slices.SortedFunc(maps.Keys(sums), func(a, b ledger.Component) int {
		return cmp.Or(cmp.Compare(sums[b], sums[a]), cmp.Compare(a, b))
	})
	return names[:min(most, len(names))], sums
}

// allRungs shows a whole ladder, with the lines of a program that do the same as its flags.
func allRungs(l *lever.Ladder) Section { return rungs(l, math.MaxInt, true) }

// rungs shows a ladder, with as many rungs as are wanted: those that free most, and the last, which says how the job
// stands.
func rungs(l *lever.Ladder, most int, inCode bool) Section {
	if l == nil {
		return nil
	}
	var facts Facts
	shown := weightiest(l.Rungs, most)
	for k, i := range shown {
		name := ""
		if k == 0 {
			name = "to fit"
		}
		facts.add(name, "%s", rungWords(i+1, &l.Rungs[i], i == len(l.Rungs)-1))
		if len(l.Rungs[i].Code) > 0 && inCode {
			facts.add("", "   in a program: %s", strings.Join(l.Rungs[i].Code, "; "))
		}
	}
	if hidden := len(l.Rungs) - len(shown); hidden > 0 {
		facts.add("", "with %d more that free less: --long", hidden)
	}
	if l.Host > 0 {
		facts.add("host", "%v of host memory then: give --host-memory", l.Host)
	}
	if l.Machine != nil {
		facts.add("or", "%v: enough for the job with these changes", l.Machine)
	}
	return Section{facts}
}

// weightiest returns the places of the last rung and of those before it that free most, in their order.
func weightiest(list []lever.Rung, most int) (places []int) {
	for i := range list {
		places = append(places, i)
	}
	last := len(list) - 1
	slices.SortStableFunc(places, func(a, b int) int {
		if a == last || b == last {
			return cmp.Compare(b, a)
		}
		return cmp.Compare(max(list[b].Frees, list[b].There), max(list[a].Frees, list[a].There))
	})
	places = places[:min(most, len(places))]
	slices.Sort(places)
	return places
}

// costWords say what a rung costs, where a model of time does not tell.
var costWords = map[lever.Cost]string{lever.Time: ", slower", lever.Training: ", changes the training"}

// rungWords says a rung: the change, what it frees and costs, and how the job stands with it. A rung before the last
// that helps another phase than the fullest leaves the job where it was.
func rungWords(number int, r *lever.Rung, isLast bool) string {
	helpsElsewhere := r.Frees*100 < r.There
	frees := fmt.Sprintf("frees %v", r.Frees)
	if helpsElsewhere {
		frees = fmt.Sprintf("frees %v in the %s phase", r.There, r.Phase)
	}
	if r.There <= 0 && r.Frees <= 0 {
		frees = "frees nothing alone"
	}
	cost := costWords[r.Cost]
	if s := r.Seconds; s != nil && r.Cost != lever.Training && (*s >= 0.001 || *s <= -0.001) {
		cost = fmt.Sprintf(", %s a step slower", seconds(*s))
		if *s < 0 {
			cost = fmt.Sprintf(", %s a step faster", seconds(-*s))
		}
	}
	words := fmt.Sprintf("%d. %s: %s%s", number, r.Says(), frees, cost)
	if helpsElsewhere && !isLast {
		return words
	}
	return words + "; " + standing(r.Verdict, r.Lacks)
}

// standing says whether a job fits, or what it lacks.
func standing(v plan.Result, lacks ledger.Bytes) string {
	switch {
	case v == plan.Fits:
		return "fits"
	case lacks > 0:
		return fmt.Sprintf("still lacks %v", lacks)
	case v == plan.Tight:
		return "tight"
	}
	return string(v)
}

// next says what to do after the plan.
func (d *PlanDocument) next() string {
	l := d.Ladder
	switch {
	case d.Applied != nil:
		return "put the written files in the place of yours"
	case l != nil && l.All != nil && (l.Fits() || l.All.Verdict == plan.Tight):
		if len(l.All.Edits) > 0 {
			return "add --apply FOLDER to write your files with these edits"
		}
		return "add " + strings.ReplaceAll(" "+strings.Join(l.All.Flags, " "), " add ", " ")[1:]
	case l != nil && l.Machine != nil:
		return "plan the larger machine, or a smaller model"
	case d.Lacks(false):
		return "try a smaller model, more GPUs or larger ones; --long shows what fills them"
	case d.Limit == nil:
		return "give --gpu NAME for a verdict; plimsoll models --gpus lists them"
	}
	if d.unsearched {
		return "--long shows every figure"
	}
	return "plimsoll fit searches the fastest settings; --long shows every figure"
}
