package fit

import (
	"fmt"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/state/tier"
)

// variant is everything of a recipe but its micro batch: an engine, how ranks share the model, what it offloads, what
// it recomputes, and its GPUs. Memory grows with the micro batch of a variant, so a variant has one limit.
type variant struct {
	name string
	// leastName is the name of the variant that differs in recomputing all blocks.
	leastName string
	overrides job.Overrides
	config    string // of DeepSpeed, if no file of the user has it
	// inputs are those of the job with edited files; nil for those of the question.
	inputs  *job.Inputs
	degrees degrees // that the search has chosen
}

// microBatches are the micro batches that are tried.
var microBatches = []int{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, LargestTried}

// LargestTried is the largest micro batch that is tried.
const LargestTried = 128

// recomputations are the ways to recompute that are tried, by their names in that of a variant.
var recomputations = map[string]string{"full": ", blocks recomputed", "selective": ", selective"}

// listVariants lists the variants of a question. Files of the user decide the engine: what they do not configure is not
// tried, as the answer is written in their own format.
func (s *torchSearch) listVariants() ([]variant, error) {
	q, base := s.Question, s.base
	said, err := q.saysSettings(base)
	if err != nil {
		return nil, err
	}
	s.answer.Says = said
	engines, err := q.engines(base, said)
	if err != nil {
		return nil, err
	}
	return s.withRecomputing(engines)
}

// withRecomputing lists variants of engines: the GPUs that are tried, with their degrees, and what is recomputed.
func (s *torchSearch) withRecomputing(engines []variant) ([]variant, error) {
	q, base, said := s.Question, s.base, s.answer.Says
	recomputes := []string{"none", "selective", "full"}
	if said {
		recomputes = []string{"none", "full"} // what files can say
	}
	if q.Request.Recompute != "" {
		recomputes = []string{""}
	}
	var list []variant
	for _, gpus := range q.gpuCounts(base) {
		shared, err := s.withDegrees(engines, gpus[0]*gpus[1], gpus[0])
		if err != nil {
			return nil, err
		}
		for _, engine := range shared {
			count := ""
			if q.FewerGPUs {
				count = fmt.Sprintf(", %d GPUs", gpus[0]*gpus[1])
			}
			for _, way := range recomputes {
				v := engine
				v.overrides.Recompute = way
				v.overrides.GPUs, v.overrides.Nodes = gpus[0], gpus[1]
				v.name += recomputations[way] + count
				if way != "" {
					v.leastName = engine.name + recomputations["full"] + count
				}
				list = append(list, v)
			}
		}
	}
	return list, nil
}

// gpuCounts returns the GPUs of a node and the nodes that are tried: those of the job, and with FewerGPUs each half.
func (q *Question) gpuCounts(base *job.Job) [][2]int {
	counts := [][2]int{{base.RanksPerNode, base.Nodes}}
	for q.FewerGPUs {
		last := counts[len(counts)-1]
		switch {
		case last[1] > 1:
			last[1] /= 2
		case last[0] > 1:
			last[0] /= 2
		default:
			return counts
		}
		counts = append(counts, last)
	}
	return counts
}

// saysSettings reports whether a file of the user says settings of a training, other than that of its model.
func (q *Question) saysSettings(base *job.Job) (bool, error) {
	for _, file := range base.Files {
		if s, err := recipe.LoadSettings(file, q.Request.Texts); s != nil || err != nil {
			return true, err
		}
	}
	return false, nil
}

// engines lists the engines, each with what it can offload. Files that say settings decide the engine.
func (q *Question) engines(base *job.Job, said bool) ([]variant, error) {
	switch {
	case q.Request.ZeRO != "":
		text, err := q.Request.ZeROConfig()
		return deepSpeedRoads(string(text), nil), err
	case base.DeepSpeed != nil:
		return deepSpeedRoads("", nil), nil
	case base.FSDP != nil && q.Request.FSDP == "":
		return q.fsdpRoads("", base), nil
	}
	plain := plainVariant(base)
	list := q.withStates(plain)
	if !said {
		list = append(list, q.inService(plain, base)...)
	}
	if !said && q.States.Tier.Disks > 0 {
		list = append(list, q.onDisks(plain, base)...)
	}
	if base.World > 1 {
		list = append(list, q.fsdpRoads("2", base)...)
	}
	if said || base.Adapter != nil || base.Quantization != nil {
		return list, nil
	}
	precision, mixed := strings.CutPrefix(strings.ToLower(q.Request.Precision), "amp-")
	if !mixed { // DeepSpeed keeps fp32 master weights, which nobody asked for
		return list, nil
	}
	text := fmt.Sprintf(deepSpeedConfig, precision)
	parsed, err := deepspeed.Parse(ConfigFile, []byte(text), version.Version{})
	if err != nil {
		return nil, fault.File(ConfigFile).Inputf("%v", err)
	}
	return append(list, deepSpeedRoads(text, parsed)...), nil
}

// plainVariant is torch's own loop.
func plainVariant(base *job.Job) variant {
	v := variant{name: "DistributedDataParallel", overrides: job.Overrides{FSDP: job.NoFSDP}}
	if base.World == 1 {
		v.name = "one GPU"
	}
	return v
}

// ConfigFile is the name of a DeepSpeed configuration that no file of the user was.
const ConfigFile = "ds_config.json"

const deepSpeedConfig = `{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "%s": {
    "enabled": true
  },
  "zero_optimization": {
    "stage": 1,
    "overlap_comm": true,
    "contiguous_gradients": true
  }
}
`

// deepSpeedRoads lists ZeRO's stages with what each can offload.
func deepSpeedRoads(text string, config *deepspeed.Config) []variant {
	var list []variant
	for stage := 1; stage <= 3; stage++ {
		for _, overlaps := range []bool{false, true} {
			devices := [][2]string{{"none", "none"}, {"cpu", "none"}}
			if stage == 3 {
				devices = append(devices, [2]string{"cpu", "cpu"})
			}
			for _, device := range devices {
				v := variant{name: fmt.Sprintf("ZeRO-%d", stage), config: text, overrides: job.Overrides{
					DeepSpeed: config, ZeROStage: &stage, OverlapReduction: &overlaps, OffloadOptimizer: device[0],
					OffloadParameters: device[1]}}
				if overlaps {
					v.name += ", overlap_comm"
				}
				if device[0] == "cpu" {
					v.name += ", optimizer on the CPU"
				}
				if device[1] == "cpu" {
					v.name += ", parameters on the host"
				}
				list = append(list, v)
			}
		}
	}
	return list
}

// fsdpRoads lists FSDP with what it can offload.
func (q *Question) fsdpRoads(version string, base *job.Job) []variant {
	v := variant{name: "FSDP" + version, overrides: job.Overrides{FSDP: version}}
	list := q.withStates(v)
	if base.FSDP == nil || !base.FSDP.OffloadParameters {
		v.name += ", shards on the host"
		v.overrides.FSDPOffload = true
		list = append(list, v)
	}
	return list
}

// inService lists a road with plimsoll.torch.AdamW, which holds the states on the host and updates them there, in the
// format that rounds nothing, or in all with AnyMoments. It has master weights. Who asks for them in a form gets that,
// and who asks for an optimizer gets no other.
func (q *Question) inService(v variant, base *job.Job) []variant {
	if q.Request.Optimizer != "" || base.Optimizer.Name != "adamw" || base.Adapter != nil ||
		base.Quantization != nil || base.Pipeline != nil || base.OnCPU {
		return nil
	}
	formats := []string{"split"}
	switch {
	case q.AnyMoments && q.States.Master != "fp32": // with fp32 masters all states are
		formats = []string{"split", "bf16", "int8", "split24"}
	case q.rests() && q.States.Moments != "" && q.States.Moments != "fp32":
		return nil // its formats are others
	case q.rests():
		formats = []string{q.States.Master}
	}
	var list []variant
	for _, format := range formats {
		with := v
		with.overrides.Optimizer = job.ServiceOptimizer + "/" + format
		with.name += ", plimsoll.torch.AdamW"
		if len(formats) > 1 {
			with.name += " in " + format
		}
		list = append(list, with)
	}
	return list
}

// onDisks lists the roads of inService with the states in files on disks, with each of the tiers that are tried.
func (q *Question) onDisks(v variant, base *job.Job) []variant {
	var list []variant
	for _, with := range q.inService(v, base) {
		for _, t := range q.tiers(base) {
			with := with
			with.overrides.Tier = t
			with.name += ", states on " + ledger.Plural(t.Disks, "disk")
			if t.Memory > q.States.Tier.Memory {
				with.name += fmt.Sprintf(" with %v of memory", t.Memory)
			}
			list = append(list, with)
		}
	}
	return list
}

// tiers lists the tiers that are tried: on the disks that are given, or on one. A step does not read what their memory
// keeps, so larger and larger shares of a host's memory are tried, unless the memory is given.
func (q *Question) tiers(base *job.Job) []job.Tier {
	t := q.States.Tier
	t.Disks = max(1, t.Disks)
	list := []job.Tier{t}
	if t.Memory > 0 {
		return list
	}
	for _, eighths := range []ledger.Bytes{1, 2, 4, 6} {
		if t.Memory = base.HostMemory / 8 * eighths; t.Memory > tier.DefaultMemory {
			list = append(list, t)
		}
	}
	return list
}

// rests reports whether states may rest on the host, by plimsoll.torch.StateOffload.
func (q *Question) rests() bool { return q.States.Master != "" && q.States.Master != "none" }

// withStates adds the roads of plimsoll.torch.StateOffload, in its modes and the formats of moments that are tried. Who
// asks for master weights gets them: only these roads have them.
func (q *Question) withStates(v variant) []variant {
	var list []variant
	if !q.rests() {
		list = append(list, v)
	}
	moments := []string{q.States.Moments}
	if q.AnyMoments {
		moments = job.OffloadMoments
	}
	for _, mode := range job.OffloadModes {
		for _, format := range moments {
			o, with := q.States, v
			o.What, o.Mode, o.Moments, o.Tier = job.OffloadStates, mode, format, job.Tier{}
			with.name += ", states on the host, " + mode
			if q.AnyMoments {
				with.name += ", " + format + " moments"
			}
			with.overrides.States = &o
			list = append(list, with)
		}
	}
	return list
}
