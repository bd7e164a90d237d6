//go:build linux

package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/measure/summary"
)

// BenchmarkSchema is the schema of the JSON document.
const BenchmarkSchema = "plimsoll.benchmark/1"

// Benchmark is the document of a benchmark; its tables show the same data.
type Benchmark struct {
	Schema  string          `json:"schema"` // plimsoll.benchmark/1
	Version string          `json:"version"`
	Host    RehearsedHost   `json:"host"`
	Kernel  string          `json:"kernel"`
	Rounds  int             `json:"rounds"`
	Cases   []BenchmarkCase `json:"cases"`
}

// BenchmarkCase is one format, size and number of workers.
type BenchmarkCase struct {
	Optimizer      string  `json:"optimizer"`
	State          string  `json:"state"`
	Moments        string  `json:"moments"`
	ParameterType  string  `json:"parameter_dtype"`
	GradientType   string  `json:"gradient_dtype"`
	Parameters     int64   `json:"parameters"`
	Workers        int     `json:"workers"`
	CPUs           []int   `json:"cpus"`
	Pages          string  `json:"pages"`
	Place          string  `json:"place"` // the nearest memory that holds all streams
	ResidentBytes  float64 `json:"resident_bytes_per_parameter"`
	TrafficBytes   float64 `json:"traffic_bytes_per_parameter"` // of an update, reads plus writes
	PassesOfSample int     `json:"passes_per_sample"`           // whole steps

	// Fraction is traffic time over update time in turns beside each other: 1 is the speed limit of the memory.
	Fraction summary.Spread `json:"fraction_of_limit"`
	// Modes are the speeds at which memory served the turns of traffic.
	Modes  []bench.Mode   `json:"memory_modes"`
	Limit  summary.Spread `json:"limit_bytes_per_second"`
	Update summary.Spread `json:"update_bytes_per_second"`
	Time   summary.Spread `json:"update_seconds_per_parameter"`

	Job     *BenchmarkJob     `json:"job,omitempty"`
	Step    *BenchmarkStep    `json:"step,omitempty"` // absent where the case runs in a core's cache
	Journal *BenchmarkJournal `json:"journal,omitempty"`
	Peer    *BenchmarkPeer    `json:"peer,omitempty"`
	Checks  *BenchmarkCheck   `json:"checks,omitempty"`

	Disturbed bench.Rounds   `json:"disturbed_rounds"`
	Samples   []bench.Sample `json:"samples"`
}

// BenchmarkJob is the step of a job whose parameters are divided among ranks. Its times are for all parameters on this
// host.
type BenchmarkJob struct {
	Parameters int64 `json:"parameters"`
	WorldSize  int   `json:"world_size"`
	// Ranks are those on this host, whose parameters were measured. Scale is the factor from their times to those
	// below.
	Ranks       int     `json:"ranks"`
	Scale       float64 `json:"scale"`
	SharedCores bool    `json:"shared_cores"`
	// Traffic is the bytes that an update reads or writes.
	Traffic ledger.Bytes       `json:"update_traffic_bytes"`
	Limit   summary.Spread     `json:"limit_seconds"`
	Update  summary.Spread     `json:"update_seconds"`
	Step    summary.Spread     `json:"step_seconds"` // norm and update
	Peer    []BenchmarkPeerJob `json:"peer,omitempty"`
}

// BenchmarkPeerJob is the time of a variant of the peer's step for all parameters.
type BenchmarkPeerJob struct {
	Name string         `json:"name"`
	Time summary.Spread `json:"seconds"`
}

// BenchmarkStep is the cost that the norm of the gradients adds to the update.
type BenchmarkStep struct {
	Time summary.Spread `json:"seconds_per_parameter"` // norm and update
	// Exposed is the norm in a pass of its own. Hidden is what the norm still costs when gradients are added up as
	// they arrive. Both are in units of the update.
	Exposed summary.Spread  `json:"norm_exposed"`
	Hidden  *summary.Spread `json:"norm_hidden,omitempty"`
}

// BenchmarkJournal is an update with an undo log, which another process could finish.
type BenchmarkJournal struct {
	Time  summary.Spread `json:"update_seconds_per_parameter"`
	Added summary.Spread `json:"added"` // in units of the update without an undo log
}

// BenchmarkPeer compares with another implementation in the same run.
type BenchmarkPeer struct {
	Name     string                 `json:"name"`
	Version  string                 `json:"version"`
	Variants []BenchmarkPeerVariant `json:"variants"`
}

// BenchmarkPeerVariant is one variant of the peer's step.
type BenchmarkPeerVariant struct {
	Name      string         `json:"name"`
	WholeStep bool           `json:"whole_step"` // compared with our whole step, otherwise with our update
	Time      summary.Spread `json:"seconds_per_parameter"`
	Ratio     summary.Spread `json:"time_over_ours"` // in each round
	Extra     float64        `json:"peak_extra_bytes_per_parameter"`
}

// BenchmarkCheck is the result of the checks.
type BenchmarkCheck struct {
	Collections          int            `json:"forced_collections"`
	Stop                 float64        `json:"stop_seconds"` // nine in ten stops take at most this long
	IdleStop             float64        `json:"stop_without_steps_seconds"`
	LongestStop          float64        `json:"longest_stop_seconds"`
	LongestIdleStop      float64        `json:"longest_stop_without_steps_seconds"`
	StopAdded            float64        `json:"stop_added_seconds"`
	MostStopAdded        float64        `json:"stop_added_seconds_target"`
	DenormalSlowdown     summary.Spread `json:"denormal_slowdown"`
	MostDenormalSlowdown float64        `json:"denormal_slowdown_target"`
	Disturbed            bench.Rounds   `json:"disturbed_rounds"`
	WithinTargets        bool           `json:"within_targets"`
}

// NewBenchmark makes the document of a benchmark.
func NewBenchmark(version string, p *bench.Suite, results []bench.Result) *Benchmark {
	b := &Benchmark{
		Schema: BenchmarkSchema, Version: version, Kernel: p.Kernel.String(), Rounds: p.Rounds, Host: newHost(p.Host),
	}
	for _, r := range results {
		b.Cases = append(b.Cases, newBenchmarkCase(r, p.Norm))
	}
	return b
}

func newBenchmarkCase(r bench.Result, hidden bool) BenchmarkCase {
	f, n := r.Format(), float64(r.Held)
	over := func(quantity func(bench.Sample) float64) summary.Spread { return summary.Over(r.Samples, quantity) }
	resident, bytes := float64(r.StateBytes()), float64(r.TrafficBytes())
	c := BenchmarkCase{
		Optimizer:      r.Name,
		State:          f.State.String(),
		Moments:        f.Moments.String(),
		ParameterType:  f.Parameter.String(),
		GradientType:   f.Gradient.String(),
		Parameters:     r.Held,
		Workers:        len(r.CPUs()),
		CPUs:           r.CPUs(),
		Pages:          r.Pages().String(),
		Place:          r.Place,
		ResidentBytes:  resident / n,
		TrafficBytes:   bytes / n,
		PassesOfSample: r.Repeats,
		Fraction:       over(func(s bench.Sample) float64 { return s.Fraction }),
		Modes:          r.Modes(),
		Limit:          over(func(s bench.Sample) float64 { return bytes / s.Traffic }),
		Update:         over(func(s bench.Sample) float64 { return bytes / s.Update }),
		Time:           over(func(s bench.Sample) float64 { return s.Update / n }),
		Disturbed:      r.Rounds, Samples: r.Samples,
	}
	if !r.InCore {
		c.Step = &BenchmarkStep{
			Time:    over(func(s bench.Sample) float64 { return (s.Norm + s.Update) / n }),
			Exposed: over(func(s bench.Sample) float64 { return s.Norm / s.Update }),
		}
		if hidden {
			left := over(func(s bench.Sample) float64 { return s.Arrived/s.StepUpdate - 1 })
			c.Step.Hidden = &left
		}
	}
	if r.Journaled {
		c.Journal = &BenchmarkJournal{
			Time:  over(func(s bench.Sample) float64 { return s.Journaled / n }),
			Added: over(func(s bench.Sample) float64 { return s.Journaled/s.Update - 1 }),
		}
	}
	if r.Compared != nil {
		c.Peer = newBenchmarkPeer(r)
	}
	if r.Divided {
		c.Job = newBenchmarkJob(r)
	}
	if k := r.Checked; k != nil {
		c.Checks = &BenchmarkCheck{
			Collections: k.Collections, Stop: k.Stops.NineInTen.Seconds(), IdleStop: k.IdleStops.NineInTen.Seconds(),
			LongestStop: k.Stops.Longest.Seconds(), LongestIdleStop: k.IdleStops.Longest.Seconds(),
			StopAdded: k.StopAdded().Seconds(), MostStopAdded: bench.MostStopAdded.Seconds(),
			DenormalSlowdown: k.Denormal, MostDenormalSlowdown: bench.MostDenormalSlowdown, Disturbed: k.Rounds,
			WithinTargets: k.StopAdded() <= bench.MostStopAdded && k.Denormal.Median <= bench.MostDenormalSlowdown,
		}
	}
	return c
}

func newBenchmarkJob(r bench.Result) *BenchmarkJob {
	over := func(quantity func(bench.Sample) float64) summary.Spread {
		return summary.Over(r.Samples, func(s bench.Sample) float64 { return r.Scale() * quantity(s) })
	}
	j := &BenchmarkJob{
		Parameters: r.Parameters, WorldSize: r.WorldSize, Ranks: len(r.Shards), Scale: r.Scale(),
		SharedCores: r.SharedCores, Traffic: ledger.Bytes(math.Round(float64(r.TrafficBytes()) * r.Scale())),
		Limit:  over(func(s bench.Sample) float64 { return s.Traffic }),
		Update: over(func(s bench.Sample) float64 { return s.Update }),
		Step:   over(func(s bench.Sample) float64 { return s.Norm + s.Update }),
	}
	if r.Compared != nil {
		for _, v := range r.Compared.Variants {
			took := over(func(s bench.Sample) float64 { return s.Peer[v.Name] })
			j.Peer = append(j.Peer, BenchmarkPeerJob{v.Name, took})
		}
	}
	return j
}

func newBenchmarkPeer(r bench.Result) *BenchmarkPeer {
	n := float64(r.Held)
	p := &BenchmarkPeer{Name: r.Compared.Name, Version: r.Compared.Version}
	for _, v := range r.Compared.Variants {
		p.Variants = append(p.Variants, BenchmarkPeerVariant{
			Name: v.Name, WholeStep: v.WholeStep, Extra: float64(v.Extra) / n,
			Time: summary.Over(r.Samples, func(s bench.Sample) float64 { return s.Peer[v.Name] / n }),
			Ratio: summary.Over(r.Samples, func(s bench.Sample) float64 {
				if v.WholeStep {
					return s.Peer[v.Name] / s.Step
				}
				return s.Peer[v.Name] / s.StepUpdate
			}),
		})
	}
	return p
}

// Page shows how near every case comes to the limit of the memory, and what was measured beside.
func (b *Benchmark) Page() *Page {
	var run, checks Facts
	run.add("host", "%s", b.Host)
	run.add("kernels, pages", "%s, %s", b.Kernel, b.pages())
	run.add("rounds", "%s", b.rounds())
	for _, c := range b.Cases {
		if k := c.Checks; k != nil {
			checks.add("stop-the-world pauses", "90 %% within %s while steps run, within %s without (target: %s "+
				"more); the longest are %s and %s; %d forced collections", seconds(k.Stop), seconds(k.IdleStop),
				seconds(k.MostStopAdded), seconds(k.LongestStop), seconds(k.LongestIdleStop), k.Collections)
			checks.add("denormal numbers", "an update takes %s times as long (target: %g)",
				spread(2, k.DenormalSlowdown), k.MostDenormalSlowdown)
		}
	}
	return &Page{
		Title:    "Benchmark of updates",
		Sections: []Section{{run}, b.updates(), b.jobs(), b.norms(), b.journals(), b.peers(), {checks}},
		Document: b,
	}
}

func (b *Benchmark) pages() string {
	var kinds []string
	for _, c := range b.Cases {
		if !strings.Contains(strings.Join(kinds, ", "), c.Pages) {
			kinds = append(kinds, c.Pages)
		}
	}
	return strings.Join(kinds, ", ")
}

func (b *Benchmark) rounds() string {
	var sum bench.Rounds
	for _, c := range b.Cases {
		sum.ThrownAway += c.Disturbed.ThrownAway
		sum.Contended += c.Disturbed.Contended
	}
	kept := fmt.Sprintf("%d for each line; %d were repeated because others used these CPUs", b.Rounds, sum.ThrownAway)
	if sum.Contended > 0 {
		kept += fmt.Sprintf(", and %d of %d that were kept are disturbed, too", sum.Contended, b.Rounds*len(b.Cases))
	}
	return kept
}

// caseTable returns a table whose first columns name a case.
func caseTable(columns ...Column) *Table {
	t := new(Table).with(Words, "optimizer", "state", "moments").with(Number, "parameters", "workers")
	t.Columns = append(t.Columns, columns...)
	return t
}

// addCase adds a row of a case.
func (t *Table) addCase(c BenchmarkCase, cells ...any) {
	t.add(append([]any{c.Optimizer, c.State, c.Moments, bench.Count(c.Parameters), c.Workers}, cells...)...)
}

func (b *Benchmark) updates() Section {
	t := caseTable(Column{Title: "in", Kind: Label}, Column{Title: "B/parameter", Kind: Number},
		Column{Title: "limit GB/s", Kind: Number, Decimals: 1}, Column{Title: "update GB/s", Kind: Number, Decimals: 1},
		Column{Title: "ns/parameter", Kind: Number, Decimals: 3}, Column{Title: "of the limit", Kind: Share},
		Column{Title: "memory mode", Kind: Label})
	noisy := false
	for _, c := range b.Cases {
		t.addCase(c, c.Place, shortBytes(c.TrafficBytes), c.Limit.Median/1e9, c.Update.Median/1e9, 1e9*c.Time.Median,
			bound(c.Fraction), b.mode(c))
		noisy = noisy || c.Fraction.Median > 1
	}
	if noisy {
		return t.explained("memory-bound: as fast as memory. " +
			"Other programs use it, too, so the share varies beyond 100 %")
	}
	return Section{t}
}

// mode says at which speeds memory served several workers, in units of its speed for one worker of the same case.
func (b *Benchmark) mode(c BenchmarkCase) any {
	if c.Workers == 1 || c.Place == "L2" {
		return nil
	}
	one := 0.0
	for _, other := range b.Cases {
		if other.Workers == 1 && other.isLike(c) {
			one = other.Limit.Median
		}
	}
	var modes []string
	for _, m := range c.Modes {
		text := fmt.Sprintf("%.0f GB/s", m.Rate/1e9)
		if one > 0 {
			text = fmt.Sprintf("%.1fx one worker", m.Rate/one)
		}
		if len(c.Modes) > 1 {
			text += fmt.Sprintf(" in %.0f %%", 100*m.Share)
		}
		modes = append(modes, text)
	}
	return strings.Join(modes, ", ")
}

// isLike reports whether two cases differ in their workers alone.
func (c BenchmarkCase) isLike(other BenchmarkCase) bool {
	return c.Optimizer == other.Optimizer && c.State == other.State && c.Moments == other.Moments &&
		c.GradientType == other.GradientType && c.Parameters == other.Parameters
}

// bound writes the share of the limit that an update reaches.
func bound(fraction summary.Spread) string {
	if fraction.Median > 1 {
		return fmt.Sprintf("memory-bound (%.0f..%.0f)", 100*fraction.Min, 100*fraction.Max)
	}
	return shares(0, fraction)
}

// jobs returns nothing where no job was divided among ranks.
func (b *Benchmark) jobs() Section {
	t := new(Table).with(Words, "optimizer", "state", "moments").with(Number, "parameters", "ranks", "workers").
		with(Words, "step").with(Bytes, "bytes moved")
	t.Columns = append(t.Columns, Column{Title: "ms", Kind: Number, Decimals: 1},
		Column{Title: "ps/parameter", Kind: Number, Decimals: 1}, Column{Title: "of the limit", Kind: Share})
	var notes []string
	for _, c := range b.Cases {
		j := c.Job
		if j == nil {
			continue
		}
		row := func(step string, moved any, time summary.Spread, share any) {
			t.add(c.Optimizer, c.State, c.Moments, strconv.FormatInt(j.Parameters, 10), j.Ranks, c.Workers, step, moved,
				1e3*time.Median, 1e12*time.Median/float64(j.Parameters), share)
		}
		row("limit", j.Traffic, j.Limit, nil)
		row("update", j.Traffic, j.Update, bound(c.Fraction))
		row("norm, update", nil, j.Step, nil)
		for _, p := range j.Peer {
			row(c.Peer.Name+" "+p.Name, nil, p.Time, nil)
		}
		if note := j.note(c.Parameters); !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	return t.explained(strings.Join(notes, "\n"))
}

// note says what the times of a job are made of.
func (j *BenchmarkJob) note(held int64) string {
	text := "limit: the same bytes without arithmetic, in the same rounds"
	if j.WorldSize > j.Ranks {
		text += fmt.Sprintf("; measured: %d of %d parameters (%d of %d ranks), times multiplied by %.4g: this host "+
			"alone with memory for all", held, j.Parameters, j.Ranks, j.WorldSize, j.Scale)
	}
	if j.SharedCores {
		text += "; ranks share cores, as there are too few"
	}
	return text
}

// norms returns nothing where the norm was not measured.
func (b *Benchmark) norms() Section {
	t := caseTable(Column{Title: "norm exposed", Kind: Share}, Column{Title: "norm hidden", Kind: Share},
		Column{Title: "whole step ns/parameter", Kind: Number, Decimals: 3})
	for _, c := range b.Cases {
		if c.Step != nil && c.Step.Hidden != nil {
			t.addCase(c, c.Step.Exposed.Median, c.Step.Hidden.Median, 1e9*c.Step.Time.Median)
		}
	}
	return t.explained("exposed: a pass of its own; hidden: added up as gradients arrive; " +
		"both in addition to the update")
}

// journals returns nothing where the undo log was not measured.
func (b *Benchmark) journals() Section {
	t := caseTable(Column{Title: "ns/parameter", Kind: Number, Decimals: 3},
		Column{Title: "with journal", Kind: Number, Decimals: 3}, Column{Title: "added", Kind: Share})
	for _, c := range b.Cases {
		if c.Journal != nil {
			t.addCase(c, 1e9*c.Time.Median, 1e9*c.Journal.Time.Median, shares(1, c.Journal.Added))
		}
	}
	return t.explained("with journal: an update that another process could finish")
}

// peers returns nothing without a peer.
func (b *Benchmark) peers() Section {
	t := caseTable(Column{Title: "peer", Kind: Label}, Column{Title: "ns/parameter", Kind: Number, Decimals: 3},
		Column{Title: "time / ours", Kind: Number}, Column{Title: "extra B/parameter", Kind: Number, Decimals: 1})
	version := ""
	for _, c := range b.Cases {
		if c.Peer == nil {
			continue
		}
		version = c.Peer.Name + " " + c.Peer.Version
		for _, v := range c.Peer.Variants {
			t.addCase(c, v.Name, 1e9*v.Time.Median, spread(2, v.Ratio), v.Extra)
		}
	}
	return t.explained(version + ", AdamW in fp32, against our update; " +
		"sequence: norm, unscale, update and bf16 copy, as DeepSpeed does them, against our whole step")
}

// explained returns the table with a line below it, and nothing where the table has no rows.
func (t *Table) explained(text string) Section {
	if len(t.Rows) == 0 {
		return nil
	}
	return Section{t, Paragraph(text)}
}

// spread writes a median with the least and the most.
func spread(decimals int, s summary.Spread) string {
	return fmt.Sprintf("%.*f (%.*f..%.*f)", decimals, s.Median, decimals, s.Min, decimals, s.Max)
}

// shares writes a spread in percent, with the decimals of the median.
func shares(decimals int, s summary.Spread) string {
	return fmt.Sprintf("%.*f %% (%.0f..%.0f)", decimals, 100*s.Median, 100*s.Min, 100*s.Max)
}
