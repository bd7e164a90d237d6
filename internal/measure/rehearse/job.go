//go:build linux

package rehearse

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/model"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/deepspeed"
	_ "plimsoll/internal/input/recipe/programs" // recognizes files
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Request is a rehearsal as a user asks for it. Empty and nil fields take their value from the recipe, or the
// default.
type Request struct {
	Model     string // as model.Load takes it
	Online    bool   // ask the Hugging Face hub for a model that this host does not have
	DeepSpeed string // path of a DeepSpeed configuration
	Ranks     int    // on this host
	WorldSize int    // ranks of the whole job; 0 means Ranks
	Steps     int
	Optimizer string // a name of package optim
	State     string // "split", "fp32" or "split24"
	Moments   string // "fp32", "bf16" or "int8"
	// EmbeddingMoments is "fp32" or "int8"; it applies where Moments is "int8".
	EmbeddingMoments string
	Precision        string   // "bf16", "fp16" or "fp32"
	GradientType     string   // "bf16", "fp16" or "fp32"
	Clip             *float64 // 0 for none
	LossScaling      LossScaling
	Workers          int // of each rank; 0 means one for each of its cores
	Reserve          int // cores to leave to the system
	Pace             PaceRequest
	Tier             TierRequest
}

// Job is a rehearsal with everything decided except the host.
type Job struct {
	Model  *model.Model
	Recipe *deepspeed.Config // nil when none was given
	Format kernel.Format
	// EmbeddingMoments is the type of the moments of embeddings.
	EmbeddingMoments kernel.MomentType
	Optimizer        optim.Optimizer
	Clip             float64
	// LossScaler is the scaler before the first step. An unscaled loss has a fixed scale of 1.
	LossScaler optim.LossScaler
	Ranks      int
	WorldSize  int
	Workers    int
	Reserve    int
	Steps      int
	// TrainerCores is the share of each rank's cores that is left to a trainer.
	TrainerCores binding.TrainerShare
	Kernel       kernel.Set
	Pace         *Pace        // nil for steps that follow each other at once
	Tier         *TierRequest // nil: all state is in memory
	// Notes lists the assumptions, and where the job differs from the recipe.
	Notes []string
}

// Resolve reads the files of the request and decides every open choice. Every error is about the request.
func (r Request) Resolve() (*Job, error) {
	j := &Job{Ranks: r.Ranks, WorldSize: r.WorldSize, Workers: r.Workers, Reserve: r.Reserve, Steps: r.Steps,
		Optimizer: optim.DefaultAdamW(), Clip: 1, LossScaler: optim.DefaultLossScaler()}
	if j.WorldSize == 0 {
		j.WorldSize = j.Ranks
	}
	if err := r.checkNumbers(j.WorldSize); err != nil {
		return nil, err
	}
	set, err := kernel.Select()
	if err != nil {
		return nil, &fault.Input{Err: err}
	}
	j.Kernel = set
	if r.Model == "" {
		return nil, fault.Inputf("no model was named").
			WithHint("--model takes a catalog name such as qwen2.5-0.5b, a config.json, or safetensors files")
	}
	load := model.Load
	if r.Online {
		load = model.LoadOnline
	}
	if j.Model, err = load(r.Model); err != nil {
		return nil, err
	}
	if j.Model.Elements() == 0 {
		where := fault.Position{File: r.Model}
		return nil, where.Inputf("the model has no parameters: every tensor has 0 elements")
	}
	if r.DeepSpeed != "" {
		if err := j.applyRecipe(r.DeepSpeed); err != nil {
			return nil, err
		}
	}
	if err := r.chooseOptimizer(j); err != nil {
		return nil, err
	}
	precision, err := r.choosePrecision(j)
	if err != nil {
		return nil, err
	}
	if r.Clip != nil {
		j.Clip = *r.Clip
	}
	if j.Format, err = r.chooseFormat(j.Optimizer.Algorithm(), precision); err != nil {
		return nil, err
	}
	if err := r.LossScaling.apply(j); err != nil {
		return nil, err
	}
	if j.EmbeddingMoments, err = r.chooseEmbeddingMoments(j.Format.Moments); err != nil {
		return nil, err
	}
	if j.Tier, err = r.Tier.resolve(r.Pace); err != nil {
		return nil, err
	}
	return j, j.pace(r.Pace, r.Clip)
}

// maxWorldSize is more than any job has. It bounds the plan, which lists the shards of all ranks.
const maxWorldSize = 1 << 20

func (r Request) checkNumbers(worldSize int) error {
	for _, number := range []struct {
		flag         string
		value, least int
	}{
		{"--ranks", r.Ranks, 1},
		{"--world-size", worldSize, r.Ranks},
		{"--steps", r.Steps, 0},
		{"--workers", r.Workers, 0},
	} {
		if number.value < number.least {
			return fault.Inputf("%s is %d: expected at least %d", number.flag, number.value, number.least)
		}
	}
	if worldSize > maxWorldSize {
		return fault.Inputf("--world-size is %d: expected at most %d", worldSize, maxWorldSize)
	}
	if r.Clip != nil && (!(*r.Clip >= 0) || math.IsInf(*r.Clip, 1)) {
		return fault.Inputf("--clip is %g: expected a norm of 0 or more", *r.Clip).
			WithHint("--clip 0 turns clipping off")
	}
	return nil
}

// applyRecipe applies a DeepSpeed configuration to the job.
func (j *Job) applyRecipe(path string) error {
	d, err := recipe.LoadDeepSpeed(path, recipe.Source{})
	if err != nil {
		return err
	}
	j.Recipe = d
	for _, note := range d.Notes {
		j.Notes = append(j.Notes, note.String())
	}
	note := func(format string, arguments ...any) {
		j.Notes = append(j.Notes, path+": "+fmt.Sprintf(format, arguments...))
	}
	if d.Batch.Train == 0 && d.Batch.Micro == 0 {
		note("no batch size is given as a number, so the batch equation is not checked")
	} else if _, err := d.ResolveBatch(j.WorldSize); err != nil {
		return err
	}
	if d.ZeROStage == 0 {
		note("ZeRO stage 0 gives every rank the full optimizer state; the rehearsal splits it among the ranks, as " +
			"stage 1 does")
	}
	if d.OffloadOptimizer.Device != "cpu" {
		note("the optimizer is not offloaded to the host (zero_optimization.offload_optimizer.device is %q); the "+
			"rehearsal offloads it", d.OffloadOptimizer.Device)
	}
	if d.Optimizer != nil {
		if j.Optimizer, err = optimizerOf(path, d.Optimizer); err != nil {
			return err
		}
	}
	j.Clip = d.GradientClipping
	if s := d.LossScale; s != (deepspeed.LossScale{}) {
		j.LossScaler = optim.LossScaler{
			Static: s.Static, InitialScalePower: s.InitialPower, Window: int64(s.Window),
			Hysteresis: s.Hysteresis, ConsecutiveHysteresis: s.ConsecutiveHysteresis, Minimum: float64(s.Minimum),
		}
	}
	return nil
}

// chooseOptimizer sets the optimizer that was asked for.
func (r Request) chooseOptimizer(j *Job) error {
	if r.Optimizer == "" {
		return nil
	}
	rule, err := optim.ParseRule(r.Optimizer)
	if err != nil {
		return fault.Inputf("--optimizer is %v", err)
	}
	if j.Recipe != nil && j.Recipe.Optimizer != nil {
		return fault.File(j.Recipe.File).Inputf("optimizer.type is %q, but --optimizer is %s", j.Recipe.Optimizer.Type,
			r.Optimizer).WithHint("leave --optimizer out, or remove the section from the file")
	}
	j.Optimizer = rule.Typical
	return nil
}

// choosePrecision chooses the type that the model is trained in.
func (r Request) choosePrecision(j *Job) (dtype.Type, error) {
	asked, err := kernel.ParseNumberTypeAlias(cmp.Or(r.Precision, dtype.BF16.String()))
	switch d := j.Recipe; {
	case err != nil:
		return asked, fault.Inputf("--precision is %v", err)
	case d == nil || d.Precision == dtype.Invalid && r.Precision != "":
		return asked, nil
	case d.Precision == dtype.Invalid:
		j.Notes = append(j.Notes, d.File+" leaves the precision to the trainer; the rehearsal uses bf16 "+
			"(--precision changes that)")
		return asked, nil
	case r.Precision != "" && asked != d.Precision:
		return asked, fault.File(d.File).Inputf("DeepSpeed trains in %v, but --precision is %s", d.Precision,
			r.Precision).WithHint("leave --precision out, or change the file")
	}
	return j.Recipe.Precision, nil
}

// optimizerOf returns the engine's counterpart of a recipe's optimizer.
func optimizerOf(path string, o *deepspeed.Optimizer) (optim.Optimizer, error) {
	name := strings.ToLower(o.Type)
	if name == "adam" && o.AdamW {
		name = "adamw"
	}
	rule, err := optim.ParseRule(name)
	if err != nil || rule.Algorithm() == kernel.SGD { // recipe has no hyperparameters of SGD
		return nil, fault.File(path).Inputf("optimizer.type is %q: expected AdamW, Adam, Lion or Adagrad",
			o.Type).
			WithHint("to rehearse another optimizer with two moments, set optimizer.type to AdamW: it takes the same " +
				"bytes")
	}
	found := rule.With(optim.Hyperparameters{
		LearningRate: o.LR, Beta1: o.Beta1, Beta2: o.Beta2, Epsilon: o.Epsilon, WeightDecay: o.WeightDecay,
		Uncorrected: !o.BiasCorrection,
	})
	if err := optim.Check(found, 1, 1); err != nil {
		return nil, &fault.Input{Where: fault.Position{File: path}, What: "optimizer.params", Err: err}
	}
	return found, nil
}

// chooseFormat chooses the types of all streams. The training precision decides the type of the parameters. Gradients
// and state follow unless they are given.
func (r Request) chooseFormat(algorithm kernel.Algorithm, precision dtype.Type) (kernel.Format, error) {
	f := kernel.Format{Algorithm: algorithm, State: kernel.Split, Parameter: precision, Gradient: precision}
	if precision != dtype.BF16 {
		f.State = kernel.FP32
	}
	var err error
	if r.State != "" {
		if f.State, err = kernel.ParseState(r.State); err != nil {
			return f, fault.Inputf("--state is %v", err)
		}
	}
	if f.Moments, err = kernel.ParseMoments(cmp.Or(r.Moments, kernel.MomentsFP32.String())); err != nil {
		return f, fault.Inputf("--moments is %v", err)
	}
	if !f.Moments.Suits(algorithm) {
		return f, fault.Inputf("--moments %v is for Adam and AdamW, but the optimizer is %v", f.Moments,
			algorithm).WithHint("--moments bf16")
	}
	if r.GradientType != "" {
		if f.Gradient, err = kernel.ParseNumberTypeAlias(r.GradientType); err != nil {
			return f, fault.Inputf("--grad-dtype is %v", err)
		}
	}
	if err := f.Validate(); err != nil {
		return f, &fault.Input{Err: err, Hint: "--state fp32"}
	}
	return f, nil
}

// EmbeddingMoments are the types that embeddings can have beside --moments int8.
var EmbeddingMoments = []string{kernel.MomentsFP32.String(), kernel.MomentsInt8.String()}

// chooseEmbeddingMoments chooses the type of the moments of embeddings.
func (r Request) chooseEmbeddingMoments(others kernel.MomentType) (kernel.MomentType, error) {
	switch {
	case r.EmbeddingMoments == "" && others == kernel.MomentsInt8:
		return kernel.MomentsFP32, nil
	case r.EmbeddingMoments == "":
		return others, nil
	case !slices.Contains(EmbeddingMoments, r.EmbeddingMoments):
		return others, fault.Inputf("--embedding-moments is %v", fault.Unknown(r.EmbeddingMoments, EmbeddingMoments))
	case others != kernel.MomentsInt8:
		return others, fault.Inputf("--embedding-moments is for --moments int8, but --moments is %v", others).
			WithHint("leave --embedding-moments out, or give --moments int8")
	}
	asked, _ := kernel.ParseMoments(r.EmbeddingMoments)
	return asked, nil
}

// Placement is a job on a host: the memory to map, and the workers that will use it. Nothing is allocated yet.
type Placement struct {
	*Job
	Host    *host.Host
	Binding *binding.Assignment
	Pages   arena.Pages
	Shards  []engine.ShardConfig
	// Important are the shards of the important columns of each rank, beside Shards; none without ZenFlow.
	Important []engine.ShardConfig
	// Planned is the host memory of each rank, then the memory that belongs to no rank.
	Planned []ledger.Device
	// Held is the number of elements on this host, padding included. Parameters is how many of them are the model's
	// own parameters.
	Held, Parameters int64
}

// NewPlacement places a job on a host.
func NewPlacement(j *Job, h *host.Host) (*Placement, error) {
	p := &Placement{Job: j, Host: h}
	parts, err := shard.ZeRO(j.Model.Elements(), j.WorldSize)
	if err != nil {
		return nil, err
	}
	request := binding.Request{Ranks: j.Ranks, Reserve: j.Reserve, TrainerCores: j.TrainerCores}
	if p.Binding, err = binding.Split(h, request); err != nil {
		return nil, err
	}
	pieces := j.pieces()
	for i, part := range parts[:j.Ranks] {
		cpus, err := p.workerCPUs(i)
		if err != nil {
			return nil, err
		}
		p.Binding.Ranks[i].OptimizerCPUs = cpuset.New(cpus...)
		layout, err := j.layout(pieces, part)
		if err != nil {
			return nil, err
		}
		config := engine.ShardConfig{Rank: i, Layout: layout, Kernel: j.Kernel, CPUs: cpus,
			Retracts: j.Pace != nil && j.Pace.Speculates}
		if err := j.putOnTier(&config); err != nil {
			return nil, err
		}
		p.Shards = append(p.Shards, config)
		if j.Pace != nil && j.Pace.Mode == overlap.ZenFlow {
			config := p.Shards[i]
			config.Part = importantPart
			if config.Layout, err = j.importantLayout(pieces, part); err != nil {
				return nil, err
			}
			p.Important = append(p.Important, config)
		}
		p.Held += part.Held()
		p.Parameters += part.Count
	}
	p.Pages = engine.ChoosePages(h, engine.ArenasOf(p.allShards()))
	for _, shards := range [][]engine.ShardConfig{p.Shards, p.Important} {
		for i := range shards {
			shards[i].Pages = p.Pages
		}
	}
	p.planMemory()
	return p, nil
}

// allShards returns all shards that are mapped.
func (p *Placement) allShards() []engine.ShardConfig { return slices.Concat(p.Shards, p.Important) }

// workerCPUs returns the CPUs of a rank's workers.
func (p *Placement) workerCPUs(rank int) ([]int, error) {
	cpus := p.Binding.Ranks[rank].OptimizerCPUs.List()
	if p.Workers > len(cpus) {
		return nil, fault.Inputf("--workers is %d, but rank %d has %d cores for them: CPUs %s", p.Workers, rank,
			len(cpus), p.Binding.Ranks[rank].OptimizerCPUs).
			WithHint("leave --workers out for one worker on each core, or use fewer ranks")
	}
	if p.Workers > 0 {
		cpus = cpus[:p.Workers]
	}
	return cpus, nil
}

func (p *Placement) planMemory() {
	var mapped ledger.Bytes
	for _, shard := range p.allShards() {
		p.Planned = append(p.Planned, PlanArenas(shard.Rank, shard.Arenas(), p.Pages))
		for _, a := range shard.Arenas() {
			mapped += p.Pages.Round(a.Size)
		}
	}
	node := PlanProgram(mapped, p.Pages)
	if p.Pace != nil {
		stamps := ledger.Bytes(0)
		for _, c := range p.allShards() {
			stamps += stampBytes(c, p.Pace.updates(c))
		}
		hold(&node, ledger.Process, stamps, "when the workers began and ended each chunk of the last step")
	}
	p.Planned = append(p.Planned, node)
}

// StateBytes returns the size of the arenas before rounding to pages: the bytes that the parameters cost.
func (p *Placement) StateBytes() ledger.Bytes {
	return sum(p.allShards(), engine.ShardConfig.MemoryBytes)
}

// TrafficBytes returns the bytes that an update of all parameters moves, reads plus writes.
func (p *Placement) TrafficBytes() ledger.Bytes {
	return sum(p.Shards, engine.ShardConfig.TrafficBytes)
}

// StepBytes returns the bytes that a step moves: an update, and the norm, which reads all gradients once more.
func (p *Placement) StepBytes() ledger.Bytes {
	return p.TrafficBytes() + ledger.Bytes(p.Held*p.Format.Gradient.Size())
}

// perParameter returns the state bytes per parameter, without page rounding.
func (p *Placement) perParameter() float64 { return float64(p.StateBytes()) / float64(p.Parameters) }

func sum(shards []engine.ShardConfig, of func(engine.ShardConfig) ledger.Bytes) ledger.Bytes {
	var sum ledger.Bytes
	for _, shard := range shards {
		sum += of(shard)
	}
	return sum
}

// Verdict compares a plan with the memory that the host still has.
type Verdict struct {
	Fits      bool         `json:"fits"`
	Needed    ledger.Bytes `json:"needed_bytes"`
	Available ledger.Bytes `json:"available_bytes"`
	LimitedBy string       `json:"limited_by"`
	Missing   ledger.Bytes `json:"missing_bytes"`
	WouldFit  []string     `json:"would_fit"` // changes to the job; each alone would be enough
	// Shortage names a limit of threads or files that the plan would exceed; empty for none.
	Shortage string `json:"shortage"`
}

// needed returns the memory of all ranks and of the program.
func (p *Placement) needed() ledger.Bytes { return Needed(p.Planned) }

// Verdict reports whether the plan fits, and if not, which changes would make it fit.
func (p *Placement) Verdict() Verdict {
	var arenas []arena.Plan
	threads := 0
	for _, shard := range p.Shards {
		threads += len(shard.CPUs)
		if shard.Tier != nil {
			threads += shard.Tier.Lanes // each may wait for a disk in a thread of its own
		}
		arenas = append(arenas, shard.Arenas()...)
	}
	return NewVerdict(p.Planned, p.Host, p.Pages, arenas, threads, p.wouldFit)
}

// wouldFit looks for a smaller format, for more hosts, and for a smaller model.
func (p *Placement) wouldFit(available ledger.Bytes) []string {
	found := []string{}
	changed := func(j Job) (*Placement, bool) {
		other, err := NewPlacement(&j, p.Host)
		return other, err == nil && other.needed() <= available
	}
	fits := func(j Job) bool {
		_, ok := changed(j)
		return ok
	}

	// The lossless format comes first, then the formats that round moments.
	for _, smaller := range []struct {
		flags               string
		moments, embeddings kernel.MomentType
	}{
		{"--state split --grad-dtype bf16", p.Format.Moments, p.EmbeddingMoments},
		{"--state split --grad-dtype bf16 --moments bf16", kernel.MomentsBF16, kernel.MomentsBF16},
		{"--state split --grad-dtype bf16 --moments int8", kernel.MomentsInt8, kernel.MomentsFP32},
	} {
		j := *p.Job
		j.Format.State, j.Format.Gradient, j.Format.Moments, j.EmbeddingMoments = kernel.Split, dtype.BF16,
			smaller.moments, smaller.embeddings
		if j.Format.Validate() != nil {
			continue
		}
		if other, ok := changed(j); ok && other.StateBytes() < p.StateBytes() {
			found = append(found, fmt.Sprintf("%s: %.4g bytes a parameter instead of %.4g, %v in all", smaller.flags,
				other.perParameter(), p.perParameter(), other.needed()))
			break
		}
	}
	if hosts, ok := p.hostsNeeded(fits); ok {
		found = append(found, fmt.Sprintf("--world-size %d: the job spread over %d hosts like this one, %s on each",
			hosts*p.Ranks, hosts, ledger.Plural(p.Ranks, "rank")))
	}
	if name, m := p.largestModel(fits); name != "" {
		found = append(found, fmt.Sprintf("--model %s: %s parameters, the largest model of the catalog that fits here",
			name, ledger.Count(m.Elements())))
	}
	return found
}

// hostsNeeded returns the smallest number of equal hosts that the job fits on.
func (p *Placement) hostsNeeded(fits func(Job) bool) (int, bool) {
	const most = 4096
	on := func(hosts int) bool {
		j := *p.Job
		j.WorldSize = hosts * j.Ranks
		return fits(j)
	}
	hosts := max(2, p.WorldSize/p.Ranks+1)
	for ; !on(hosts); hosts *= 2 {
		if hosts > most {
			return 0, false
		}
	}
	// The smallest number lies in (hosts/2, hosts].
	least := hosts/2 + 1
	for least < hosts {
		if middle := (least + hosts) / 2; on(middle) {
			hosts = middle
		} else {
			least = middle + 1
		}
	}
	return hosts, true
}

func (p *Placement) largestModel(fits func(Job) bool) (string, *model.Model) {
	for _, candidate := range catalog() {
		if candidate.elements >= p.Model.Elements() {
			continue
		}
		m, err := model.Load(candidate.name)
		if err != nil {
			continue
		}
		j := *p.Job
		j.Model = m
		if fits(j) {
			return candidate.name, m
		}
	}
	return "", nil
}

// sizedModel is a model of the catalog.
type sizedModel struct {
	name     string
	elements int64
}

// catalog returns the models of the catalog, the largest first. To count the elements of all takes half a second.
var catalog = sync.OnceValue(func() []sizedModel {
	var all []sizedModel
	for _, name := range model.Catalog() {
		if m, err := model.Load(name); err == nil {
			all = append(all, sizedModel{name, m.Elements()})
		}
	}
	slices.SortStableFunc(all, func(a, b sizedModel) int { return cmp.Compare(b.elements, a.elements) })
	return all
})

// Chunk returns the number of elements that a worker takes at a time.
func (p *Placement) Chunk() int { return shard.DefaultChunk }

// WorkerCount returns the number of workers of all ranks.
func (p *Placement) WorkerCount() int {
	workers := 0
	for _, shard := range p.Shards {
		workers += len(shard.CPUs)
	}
	return workers
}
