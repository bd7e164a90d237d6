package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/plan"
)

// goldenRow is a run of Megatron-LM's functional tests: its arguments, and the bytes that the last rank logged.
type goldenRow struct {
	Path         string             `json:"path"`
	Family       string             `json:"family"`
	Test         string             `json:"test"`
	Platform     string             `json:"platform"`
	Args         map[string]any     `json:"args"`
	Allocated    map[string]float64 `json:"allocated"`
	MaxAllocated map[string]float64 `json:"max_allocated"`

	stated int64 // number of GPUs, 0 if the row does not say it
}

// highest returns the largest of the values of all iterations, 0 without any.
func highest(values map[string]float64) ledger.Bytes {
	var most float64
	for _, v := range values {
		most = max(most, v)
	}
	return ledger.Bytes(most)
}

// covered says which of the two figures of golden rows are inside of their intervals.
type covered struct{ allocated, most coverage }

// goldenResult is a row beside its plan.
type goldenResult struct {
	goldenRow
	plan            goldenPlan
	allocated, most ledger.Bytes // as measured
	unread          error        // why the row could not be read
}

// planGolden plans every row of a file of golden values, or of measurements, whose other runs are left out.
func planGolden(file string) ([]goldenResult, error) {
	opened, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer opened.Close()
	lines := bufio.NewScanner(opened)
	lines.Buffer(nil, 1<<24)
	plans := map[string]goldenPlan{}
	var results []goldenResult
	for number := 1; lines.Scan(); number++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		r, isMegatron := readGolden(lines.Bytes())
		if !isMegatron {
			continue
		}
		if r.Path == "" {
			r.Path = fmt.Sprintf("line %d", number)
		}
		r.unread = cmp.Or(r.unread, r.checkDegrees())
		if r.unread == nil {
			key := r.key()
			p, known := plans[key]
			if !known {
				p = r.goldenRow.reported()
				plans[key] = p
			}
			r.plan = p
		}
		results = append(results, r)
	}
	return results, lines.Err()
}

// reported plans a row. A panic becomes the reason why it is not planned, so that the other rows are.
func (r goldenRow) reported() (p goldenPlan) {
	defer func() {
		if found := recover(); found != nil {
			p = goldenPlan{err: fmt.Errorf("an internal error: %v", found)}
		}
	}()
	return r.plan()
}

// checkDegrees refuses numbers that no count of GPUs follows from.
func (r goldenRow) checkDegrees() error {
	for _, name := range []string{"tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
		"expert-model-parallel-size", "expert-tensor-parallel-size", "num-experts", "micro-batch-size",
		"global-batch-size"} {
		value, given := r.Args[name]
		if n, isWhole := wholeOf(value); given && value != nil && (!isWhole || n < 1 || n > 1<<20) {
			return fmt.Errorf("%s is %v, expected a whole number from 1 to %d", name, value, 1<<20)
		}
	}
	return nil
}

// wholeOf returns a value of JSON as a whole number, also where it is a text.
func wholeOf(value any) (int64, bool) {
	switch x := value.(type) {
	case float64:
		return int64(x), x == math.Trunc(x)
	case string:
		n, err := strconv.ParseInt(x, 10, 64)
		return n, err == nil
	}
	return 0, false
}

// readGolden reads a row of golden values, or the run of Megatron-LM that a row of measurements has.
func readGolden(line []byte) (r goldenResult, isMegatron bool) {
	r.unread = json.Unmarshal(line, &r.goldenRow)
	if r.unread != nil && !json.Valid(line) {
		return r, true
	}
	if r.Path == "" && len(r.Args) == 0 {
		var measured measuredRow
		r.unread = json.Unmarshal(line, &measured)
		if !slices.Contains(measured.Tags, "megatron") || !strings.ContainsAny(measured.Confidence, "AB") {
			return r, false
		}
		r.goldenRow = measured.golden()
	}
	r.allocated, r.most = highest(r.Allocated), highest(r.MaxAllocated)
	return r, true
}

// measuredRow is a run of Megatron-LM in a file of measurements. The recipe of such a row is well known (confidence A
// and B). Rows of other programs have other tags.
type measuredRow struct {
	ID, Source, Confidence string
	Tags                   []string
	Arguments              map[string]any `json:"megatron_args"`
	Parallel               struct{ World int64 }
	Measured               []struct {
		Quantity, Point, Unit string
		Value                 any
	}
}

var functionalTest = regexp.MustCompile(`tests/functional_tests/\S+\.json`)

// golden returns the row as one of golden values. Its source is the file of the functional test.
func (r *measuredRow) golden() goldenRow {
	g := goldenRow{Path: functionalTest.FindString(r.Source), Args: r.Arguments, stated: r.Parallel.World,
		Allocated: map[string]float64{}, MaxAllocated: map[string]float64{}}
	if parts := strings.Split(g.Path, "/"); len(parts) >= 3 {
		parts = parts[len(parts)-3:]
		g.Family, g.Test, g.Platform = parts[0], parts[1], strings.TrimPrefix(parts[2], "golden_values_")
	}
	if g.Path == "" {
		g.Path = r.ID
	}
	for _, f := range r.Measured {
		value, isNumber := f.Value.(float64)
		unit, known := units[f.Unit]
		if !isNumber || !known {
			continue
		}
		switch f.Quantity {
		case "allocated":
			g.Allocated[f.Point] = value * unit
		case "max_allocated":
			g.MaxAllocated[f.Point] = value * unit
		}
	}
	return g
}

// coverageOfGolden counts the two figures of the rows that are planned.
func coverageOfGolden(results []goldenResult) (c covered) {
	for _, r := range results {
		if r.unread != nil || r.plan.err != nil {
			continue
		}
		if r.allocated > 0 {
			c.allocated.count(r.allocated, r.plan.end)
		}
		if r.most > 0 {
			c.most.count(r.most, r.plan.most)
		}
	}
	return c
}

// compareMegatron prints what was measured and planned of every row, or why not.
func compareMegatron(results []goldenResult, out io.Writer) covered {
	fmt.Fprintln(out, "path\tallocated\tplanned\tmax_allocated\tplanned")
	for _, r := range results {
		switch p := r.plan; {
		case r.unread != nil:
			fmt.Fprintf(out, "%s\t%s\n", oneLine(r.Path), oneLine("the row cannot be read: "+r.unread.Error()))
		case p.err != nil:
			fmt.Fprintf(out, "%s\t%s\n", oneLine(r.Path), oneLine(p.err.Error()))
		default:
			fmt.Fprintf(out, "%s\t%d\t%d\t%d\t%d\n", oneLine(r.Path), r.allocated, p.allocated, r.most, p.peak)
		}
	}
	return coverageOfGolden(results)
}

// oneLine returns a text as one cell of a table.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// goldenPlan is what a row plans.
type goldenPlan struct {
	allocated, peak ledger.Bytes
	end, most       ledger.Interval // of the two
	device          ledger.Device   // with ranks of the last stage
	err             error
}

// key is the same for rows that are planned alike.
func (r goldenRow) key() string {
	text, _ := json.Marshal(r.Args) // a map of JSON has no values that fail
	return fmt.Sprint(r.Family, r.gpu(), r.world(), r.oldFlash(), string(text))
}

// gpu returns the GPU of the platform that the file is named for.
func (r goldenRow) gpu() string {
	switch {
	case strings.Contains(r.Platform, "gb200"):
		return "B200"
	case strings.Contains(r.Platform, "h100"):
		return "H100-80GB"
	}
	return "A100-80GB"
}

// world returns the number of GPUs: two nodes of four with GB200 and one of eight else, or more if the degrees need
// them. A test's name says if it is for one node of four.
func (r goldenRow) world() int64 {
	if r.stated > 0 {
		return r.stated
	}
	world := int64(8)
	if strings.Contains(r.Test, "_1node") || strings.HasSuffix(r.Test, "1N4G") {
		world = 4
	}
	each := r.degree("tensor-model-parallel-size") * r.degree("pipeline-model-parallel-size") *
		r.degree("context-parallel-size")
	experts := r.degree("pipeline-model-parallel-size") * r.degree("expert-model-parallel-size")
	if n, given := wholeOf(r.Args["expert-tensor-parallel-size"]); given {
		experts *= n
	} else {
		experts *= r.degree("tensor-model-parallel-size")
	}
	for more := world; more <= 1<<20; more += 4 {
		if more%each == 0 && (r.degree("num-experts") <= 1 || more%experts == 0) {
			return more
		}
	}
	return world // which Megatron-LM refuses
}

// goldenKinds are the kinds of the families whose model the arguments of a row describe.
var goldenKinds = map[string]megatron.Kind{"gpt": megatron.GPT, "moe": megatron.GPT, "mixtral": megatron.GPT,
	"bert": megatron.BERT, "t5": megatron.T5}

// plan plans the last rank, which writes the log.
func (r goldenRow) plan() (p goldenPlan) {
	if p.err = r.incomplete(); p.err != nil {
		return p
	}
	kind, known := goldenKinds[r.Family]
	if !known {
		p.err = fmt.Errorf("the row does not have all arguments of the model of %s", r.Family)
		return p
	}
	m, err := recipe.ReadMegatron(r.arguments(), nil)
	if err != nil {
		p.err = err
		return p
	}
	device, err := gpu.Find(r.gpu())
	if err != nil {
		p.err = err
		return p
	}
	request := megatron.Request{Kind: kind, World: r.world(), GPU: device}
	j, err := megatron.Decide(m, request)
	if err != nil {
		p.err = err
		return p
	}
	of, err := plan.LastStage(job.OfMegatron(j))
	if err != nil {
		p.err = err
		return p
	}
	d, spread := of.Devices[0], of.Spread
	p.device = d
	last := &d.Phases[slices.IndexFunc(d.Phases, func(p ledger.Phase) bool {
		return p.Name == ledger.Step && p.Iteration == ledger.Steady
	})]
	p.allocated, p.end = last.EndAllocated, spread.AllocatedAtEnd(last)
	for _, phase := range d.Phases {
		p.peak = max(p.peak, phase.PeakAllocated)
	}
	p.most = spread.Allocated(d.Phases)
	return p
}

// incomplete says what the row does not tell.
func (r goldenRow) incomplete() error {
	switch {
	case len(r.Args) == 0:
		return errors.New("the row does not have the arguments of Megatron-LM")
	case strings.Contains(r.Test, "grpo"):
		return errors.New("the row does not have the arguments of reinforcement learning")
	case strings.Contains(r.Test, "cudagraph"):
		return errors.New("the row does not have the arguments of CUDA graphs")
	case strings.Contains(r.Test, "release") && r.Args["use-distributed-optimizer"] == true:
		return errors.New("the row does not say how many nodes a release test has, among which states are sharded")
	}
	return nil
}

// group returns the size of the groups of micro batches of a row that has interleaved stages and does not say it,
// though Megatron-LM would refuse its default: the smallest that it accepts. It is 0 for other rows.
func (r goldenRow) group() int64 {
	stages := r.degree("pipeline-model-parallel-size")
	micros := r.degree("global-batch-size") * stages * r.degree("tensor-model-parallel-size") *
		r.degree("context-parallel-size") / r.degree("micro-batch-size") / r.world()
	isAccepted := func(group int64) bool { return micros%group == 0 || micros%group >= stages }
	given := r.Args["microbatch-group-size-per-virtual-pipeline-stage"] != nil
	interleaved := r.Args["num-layers-per-virtual-pipeline-stage"] != nil ||
		r.Args["num-virtual-stages-per-pipeline-rank"] != nil
	if given || !interleaved || isAccepted(stages) {
		return 0
	}
	for group := stages; group <= micros; group++ {
		if isAccepted(group) {
			return group
		}
	}
	return 0
}

// degree returns a whole number among the arguments, 1 without it.
func (r goldenRow) degree(name string) int64 {
	if n, given := wholeOf(r.Args[name]); given {
		return n
	}
	return 1
}

// arguments returns the row's arguments as people type them.
func (r goldenRow) arguments() string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(r.Args)) {
		switch value := r.Args[name]; value {
		case nil:
		case true:
			list = append(list, "--"+name)
		default:
			text := strings.Trim(fmt.Sprint(value), "[]")
			if strings.HasPrefix(fmt.Sprint(value), "(") {
				text = fmt.Sprintf("'%v'", value)
			}
			list = append(list, fmt.Sprintf("--%s %s", name, text))
		}
	}
	if group := r.group(); group > 0 {
		list = append(list, fmt.Sprintf("--microbatch-group-size-per-virtual-pipeline-stage %d", group))
	}
	if r.oldFlash() {
		list = append(list, "--attention-backend unfused")
	}
	return strings.Join(list, " ")
}

// oldFlash reports whether attention was not fused when the values were recorded. With deterministic mode Transformer
// Engine takes flash attention only if flash-attn is 2.4.1 or later. The image of NVIDIA's long-term tests was PyTorch
// 24.01 before November 6, 2025, and 25.09 since then (commit 23a1dcaf74 of Megatron-LM). The cluster dracooci has
// recorded nothing since October 2025. That flash-attn is older in 24.01 is inferred, and agrees with the bytes. Older
// values of other clusters are in files whose names do not say it.
func (r goldenRow) oldFlash() bool {
	return strings.Contains(r.Path, "_lts_") && strings.Contains(r.Platform, "dracooci") &&
		r.Args["deterministic-mode"] == true && r.Args["attention-backend"] == nil &&
		r.Args["transformer-impl"] != "local"
}
