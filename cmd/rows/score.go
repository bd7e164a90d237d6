package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/plan"
)

// outcome is a drawn job with the planner's own figures.
type outcome struct {
	recorded
	hand figures
	// intervals are those of the peaks, by level.
	intervals [2]bounds
	refused   error
}

// bounds are the lower and the upper end of an interval.
type bounds [2]ledger.Bytes

// outcomes plans recorded jobs by hand. Jobs whose programs failed have no outcome.
func (c command) outcomes(list []recorded) (done []outcome) {
	for _, line := range list {
		if line.Program == nil || !c.chosen(line.Job) {
			continue
		}
		o := outcome{recorded: line}
		var p *plan.Plan
		if o.hand, p, o.refused = c.byHand(line.Job); o.refused == nil {
			o.intervals = intervalsOf(p, o.hand)
		}
		done = append(done, o)
	}
	return done
}

// intervalsOf returns the intervals of the peaks of the training loop.
func intervalsOf(p *plan.Plan, hand figures) [2]bounds {
	var phases []ledger.Phase
	for _, phase := range p.Devices[0].Phases {
		if slices.Contains(loop, phase.Name) {
			phases = append(phases, phase)
		}
	}
	a, r := p.Spread.Allocated(phases), p.Spread.Reserved(ledger.GPU, hand.peak(reserved), phases)
	return [2]bounds{allocated: {a.Lower, a.Upper}, reserved: {r.Lower, r.Upper}}
}

// errorOf returns by how much the planner's peak is more than the program's, in percent.
func (o outcome) errorOf(level int) float64 { return apart(o.hand.peak(level), o.Program.peak(level)) }

// inside reports whether the interval has what the program held.
func (o outcome) inside(level int) bool {
	between, held := o.intervals[level], o.Program.peak(level)
	return between[0] <= held && held <= between[1]
}

// score prints how far the planner is from recorded programs. Given a commit, it keeps the figures of jobs that were
// never scored as those of the planner at that commit.
func (c command) score(path, commit string, seed uint64) {
	list, err := readRecorded(path)
	if err != nil {
		log.Fatal(err)
	}
	if commit != "" {
		c.keepUnseen(path, commit, list)
	}
	list = slices.DeleteFunc(list, func(r recorded) bool { return seed > 0 && r.Seed != seed })
	done := c.outcomes(list)
	slices.SortStableFunc(done, func(a, b outcome) int {
		return cmp.Compare(math.Abs(a.errorOf(reserved)), math.Abs(b.errorOf(reserved)))
	})
	for _, o := range done {
		if o.refused != nil {
			fmt.Printf("%d/%d %s %s: refused: %v\n", o.Seed, o.Number, o.Job.Name, o.Job.Model, o.refused)
			continue
		}
		marks := ""
		for level, name := range levels {
			if !o.inside(level) {
				marks += " outside " + name
			}
		}
		fmt.Printf("%+6.1f %+6.1f  %d/%d %s; %s, %d tokens, %s%s\n", o.errorOf(allocated), o.errorOf(reserved), o.Seed,
			o.Number, o.Job.Name, o.Job.Model, o.Job.Sequence, o.Program, marks)
	}
	fmt.Printf("%d jobs, %d of them with a program that ended\n", len(list), len(done))
	writeDistribution(os.Stdout, done)
}

// keepUnseen writes the planner's figures of jobs that were never scored into their lines.
func (c command) keepUnseen(path, commit string, list []recorded) {
	var text strings.Builder
	encoder := json.NewEncoder(&text)
	for i := range list {
		if list[i].Unseen == nil && list[i].Program != nil {
			hand, p, err := c.byHand(list[i].Job)
			list[i].Unseen = &scored{Commit: commit, Hand: hand}
			if err != nil {
				list[i].Unseen.Failed = err.Error()
			} else {
				list[i].Unseen.Intervals = intervalsOf(p, hand)
			}
		}
		if err := encoder.Encode(list[i]); err != nil {
			log.Fatal(err)
		}
	}
	if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil {
		log.Fatal(err)
	}
}

// distribution is how far apart two plans of many jobs are, in percent.
type distribution []float64

// at returns the difference that a share of the jobs has at most.
func (d distribution) at(share float64) float64 {
	if len(d) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(d))
	return sorted[min(len(d)-1, int(share*float64(len(d))))]
}

// distributions returns the differences of peaks and phases, and their names in order.
func distributions(done []outcome) (names []string, of map[string]distribution) {
	of = map[string]distribution{}
	for level, name := range levels {
		for _, phase := range append([]string{"peak"}, phases()...) {
			key := name + ", " + phase
			names = append(names, key)
			for _, o := range done {
				hand, program := o.hand[phase], o.Program[phase]
				if phase == "peak" {
					hand[level], program[level] = o.hand.peak(level), o.Program.peak(level)
				}
				if o.refused == nil && hand[level] > 0 && program[level] > 0 {
					of[key] = append(of[key], math.Abs(apart(hand[level], program[level])))
				}
			}
		}
	}
	return names, of
}

// phases are those of the training loop, in order.
func phases() (list []string) {
	for _, iteration := range []ledger.Iteration{ledger.First, ledger.Steady} {
		for _, phase := range loop {
			list = append(list, fmt.Sprintf("%s %s", iteration, phase))
		}
	}
	return list
}

// writeDistribution writes a table of differences, and how many peaks lie in their intervals.
func writeDistribution(to io.Writer, done []outcome) {
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\tjobs\twithin 2 %\tmedian\t90th percentile\tworst\t")
	names, of := distributions(done)
	for _, name := range names {
		d := of[name]
		fmt.Fprintf(table, "%s\t%d\t%d\t%.2f %%\t%.2f %%\t%.1f %%\t\n", name, len(d), within(d, 2), d.at(0.5),
			d.at(0.9), d.at(1))
	}
	_ = table.Flush()
	for level, name := range levels {
		fmt.Fprintf(to, "%s: %d peaks are inside their intervals\n", name, insideOf(done, level))
	}
}
