package evidence

import (
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// frameworkPatterns are the texts in which frameworks say how much memory they use, and where the training loop is.
var frameworkPatterns = []pattern{
	{ // deepspeed/runtime/utils.py since January 2021
		name:       "DeepSpeed: see_memory_usage",
		literals:   []string{"Max_MA"},
		expression: `MA (?P<ma>[\d.]+) GB\s+Max_MA (?P<mma>[\d.]+) GB\s+CA (?P<ca>[\d.]+) GB\s+Max_CA (?P<mca>\d+) GB`,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			r.beginMemory(m, MemoryUsage{
				By: "DeepSpeed", Allocated: m.size("ma", ledger.GiB), PeakAllocated: m.size("mma", ledger.GiB),
				Reserved: m.size("ca", ledger.GiB), PeakReserved: m.size("mca", ledger.GiB),
			})
		},
	},
	{ // deepspeed/runtime/utils.py up to 2020
		name:       "DeepSpeed: see_memory_usage of 2020",
		literals:   []string{"GigaBytes"},
		expression: `^(?:.*\] )?(?P<what>Memory Allocated|Max Memory Allocated|Cache Allocated|Max cache Allocated)\s+(?P<size>[\d.]+)\s+GigaBytes`,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			b, ok := m.stream.block.(*memoryLines)
			if !ok || m.get("what") == "Memory Allocated" {
				b = r.beginMemory(m, MemoryUsage{By: "DeepSpeed"})
			}
			size := m.size("size", ledger.GiB)
			switch m.get("what") {
			case "Memory Allocated":
				b.fact.Allocated = size
			case "Max Memory Allocated":
				b.fact.PeakAllocated = size
			case "Cache Allocated":
				b.fact.Reserved = size
			default:
				b.fact.PeakReserved = size
			}
		},
	},
	{ // deepspeed/runtime/utils.py since March 2021
		name:       "DeepSpeed: host memory",
		literals:   []string{"CPU Virtual Memory:"},
		expression: `CPU Virtual Memory:\s+used = (?P<cpu>[\d.]+) GB, percent = (?P<pct>[\d.]+)%`,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			b, ok := m.stream.block.(*memoryLines)
			if !ok {
				b = r.beginMemory(m, MemoryUsage{By: "DeepSpeed"})
			}
			b.fact.HostUsed = m.size("cpu", ledger.GiB)
			b.fact.HostPercent, _ = strconv.ParseFloat(m.get("pct"), 64)
			r.finish(m.stream)
		},
	},
	{ // deepspeed/runtime/utils.py
		name:     "DeepSpeed: memory_status",
		literals: []string{" MEMSTATS "},
		expression: `RANK=(?P<rank>\d+) MEMSTATS (?P<tag>.*?) device=\S+ current alloc=(?P<a>[\d.]+)GB \(delta=-?[\d.]+GB max=(?P<ma>[\d.]+)GB\) ` +
			`current cache=(?P<c>[\d.]+)GB \(delta=-?[\d.]+GB max=(?P<mc>[\d.]+)GB\)`,
		kind: TrainerLog, fact: memoryUsage("DeepSpeed", ledger.GiB),
	},
	{ // deepspeed/utils/timer.py
		name:       "DeepSpeed: throughput",
		literals:   []string{"MemAllocated="},
		expression: `micro_step=\d+/global_step=(?P<step>\d+), .*MemAllocated=(?P<a>[\d.]+)GB, MaxMemAllocated=(?P<ma>[\d.]+)GB`,
		kind:       TrainerLog,
		take:       usageAndStep("DeepSpeed", ledger.GiB),
	},
	{ // deepspeed/utils/timer.py
		name:       "DeepSpeed: host memory of the timer",
		literals:   []string{", vm %:"},
		expression: `micro_step=\d+/global_step=(?P<step>\d+), vm %: (?P<pct>[\d.]+), swap %: [\d.]+`,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			percent, _ := strconv.ParseFloat(m.get("pct"), 64)
			r.emit(m, MemoryUsage{By: "DeepSpeed", HostPercent: percent})
			r.emit(m, Progress{Step: int64(m.integer("step", -1))})
		},
	},
	{ // deepspeed/utils/timer.py
		name:       "DeepSpeed: memory of the timers",
		literals:   []string{"max_mem_allocated:"},
		expression: `mem_allocated: (?P<a>[\d.]+) GB \| max_mem_allocated: (?P<ma>[\d.]+) GB(?: \| cache_allocated: (?P<c>[\d.]+) GB \| max_cache_allocated: (?P<mc>[\d.]+) GB)?`,
		kind:       TrainerLog, fact: memoryUsage("DeepSpeed", ledger.GiB),
	},
	{ // deepspeed/utils/pin_memory_tracker.py
		name:     "DeepSpeed: pinned memory",
		literals: []string{"[pinned-memory"},
		expression: `\[pinned-memory ?(?P<tag>[^\]]*)\] (?:crossed (?P<ck>[\d.]+ \w+): )?(?P<tot>[\d.]+ \w+) pinned across ` +
			`(?P<n>\d+) allocations`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			return MemoryUsage{By: "DeepSpeed", Tag: m.get("tag"), Pinned: m.size("tot", 1)}
		},
	},
	{ // deepspeed/runtime/zero/stage_1_and_2.py, stage3.py: estimators
		name:       "DeepSpeed: estimator",
		literals:   []string{"GB | offload_", "GB | {'offload_"},
		expression: `^\s*(?P<cpu>[\d.]+)GB \|\s+(?P<gpu>[\d.]+)GB \| (?P<opts>(?:\{')?offload_.*)$`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return Estimate{
				By: "DeepSpeed", Host: m.size("cpu", ledger.GiB), GPU: m.size("gpu", ledger.GiB),
				Options: m.get("opts"),
			}
		},
	},
	{ // megatron/training/utils.py: report_memory
		name:     "Megatron: memory",
		literals: []string{"max allocated:"},
		expression: `(?:\[Rank (?P<r>\d+)\] )?(?P<tag>\S.*?) ?memory \(MB\) \| allocated: (?P<a>[\d.]+) \| max allocated: (?P<ma>[\d.]+)` +
			` \| reserved: (?P<re>[\d.]+) \| max reserved: (?P<mr>[\d.]+)(?: \| total device memory used: (?P<dev>[\d.]+))?`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			m.rank = m.integer("r", m.rank)
			return MemoryUsage{
				By: "Megatron", Tag: m.get("tag"), Allocated: m.size("a", ledger.MiB),
				PeakAllocated: m.size("ma", ledger.MiB),
				Reserved:      m.size("re", ledger.MiB), PeakReserved: m.size("mr", ledger.MiB),
			}
		},
	},
	{ // megatron/training/theoretical_memory_usage.py
		name:       "Megatron: theoretical memory",
		literals:   []string{"Theoretical memory footprints"},
		expression: `Theoretical memory footprints: weight and optimizer=(?P<w>[\d.]+) MB(?:, activation=(?P<act>[\d.]+) MB, total=(?P<t>[\d.]+) MB)?`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return Estimate{
				By: "Megatron", WeightsAndStates: m.size("w", ledger.MiB), Activations: m.size("act", ledger.MiB),
				GPU: m.size("t", ledger.MiB),
			}
		},
	},
	{ // torchtitan/components/metrics.py
		name:       "torchtitan: memory",
		literals:   []string{"memory:"},
		expression: `(?:step:\s*(?P<step>\d+).*)?memory:\s*(?P<g>[\d.]+)GiB\((?P<p>[\d.]+)%\)`,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			r.emit(m, MemoryUsage{By: "torchtitan", PeakReserved: m.size("g", ledger.GiB)})
			if m.get("step") != "" {
				r.emit(m, Progress{Step: int64(m.integer("step", -1))})
			}
		},
	},
	{ // transformers/trainer_utils.py: TrainerMemoryTracker, in bytes, or in MB as the trainer logs it
		name:       "Trainer: memory metrics",
		literals:   []string{"_mem_gpu_", "_mem_cpu_"},
		expression: `(?:before_init|init|train|eval|test)_mem_(?:cpu|gpu)_(?:alloc|peaked)_delta['"]?\s*[:=]`,
		kind:       TrainerLog, take: takeMemoryMetrics,
	},
	{ // torchtune/training/memory.py: log_memory_stats, get_memory_stats
		name:       "torchtune: memory",
		literals:   []string{"GPU peak memory", "peak_memory_"},
		expression: `(?:GPU peak memory (?P<what>active|allocation|alloc|reserved): |peak_memory_(?P<key>active|alloc|reserved):)(?P<size>[\d.]+)(?: GiB)?`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			f, size := MemoryUsage{By: "torchtune"}, m.size("size", ledger.GiB)
			if m.get("what")+m.get("key") == "reserved" {
				f.PeakReserved = size
			} else {
				f.PeakAllocated = size
			}
			return f
		},
	},
	{ // torch/cuda/memory.py: memory_summary
		name:       "torch.cuda.memory_summary",
		literals:   []string{"| Allocated memory", "| GPU reserved memory"},
		expression: `^\| (?P<what>Allocated memory|GPU reserved memory)\s+\|\s*(?P<cur>\d+ +[KMGTP]?i?B)\s*\|\s*(?P<peak>\d+ +[KMGTP]?i?B)\s*\|`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			f := MemoryUsage{By: "torch", Tag: "memory_summary"}
			if m.get("what") == "Allocated memory" {
				f.Allocated, f.PeakAllocated = m.size("cur", 1), m.size("peak", 1)
			} else {
				f.Reserved, f.PeakReserved = m.size("cur", 1), m.size("peak", 1)
			}
			return f
		},
	},
	{ // lightning/pytorch/callbacks/device_stats_monitor.py, torch.cuda.memory_stats
		name:       "torch.cuda.memory_stats",
		literals:   []string{"ed_bytes.all."},
		expression: `(?P<what>allocated|reserved)_bytes\.all\.(?P<when>current|peak)['"]?\s*[:=]\s*(?P<size>\d+)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			f, size := MemoryUsage{By: "torch", Tag: "memory_stats"}, m.size("size", 1)
			switch m.get("what") + m.get("when") {
			case "allocatedcurrent":
				f.Allocated = size
			case "allocatedpeak":
				f.PeakAllocated = size
			case "reservedcurrent":
				f.Reserved = size
			default:
				f.PeakReserved = size
			}
			return f
		},
	},
	{ // vllm/v1/worker/gpu_worker.py
		name:       "vLLM: free memory at startup",
		literals:   []string{"on startup is less than desired GPU memory utilization"},
		expression: `Free memory on device (?:\w+:)?(?P<dev>\d+)? ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired`,
		kind:       TrainerLog,
		fact: func(m *match) Fact { // it has reserved nothing yet
			f := GPUOutOfMemory{
				Backend: "CUDA", Device: m.integer("dev", -1), Free: m.size("free", ledger.GiB),
				Total: m.size("total", ledger.GiB), Reserved: Size{Known: true},
			}
			if wanted := desired.FindStringSubmatch(m.whole); wanted != nil {
				f.Requested = sizeOf(wanted[1], ledger.GiB)
			}
			return f
		},
	},
}

// desired is how much of a GPU vLLM wants to have for itself.
var desired = lazyregexp.New(`utilization \([\d.]+, ([\d.]+) GiB\)`)

// lossValue is a loss and its number: errors speak of losses, too.
const lossValue = `loss(?:_\w*)?\W{0,4}(?:\w+\W{1,4})?(?:\d|nan\b)`

// modelPatterns are what trainers say of the model.
var modelPatterns = []pattern{
	{ // transformers/trainer.py, peft/peft_model.py
		name:       "trained parameters",
		literals:   []string{"trainable parameters = ", "trainable params: "},
		expression: `(?:Number of trainable parameters = |\btrainable params: )(?P<n>\d[\d,]{0,20})`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return TrainedParameters{Number: int64(m.integer("n", 0))}
		},
	},
}

// progressPatterns are the texts that tell where the training loop is.
var progressPatterns = []pattern{
	{ // deepspeed/runtime/engine.py
		name:       "DeepSpeed: step",
		literals:   []string{", skipped="},
		expression: `\bstep=(?P<step>\d+), skipped=`,
		kind:       TrainerLog, fact: step,
	},
	{ // megatron/training/training.py
		name:       "Megatron: step",
		literals:   []string{" iteration "},
		expression: `^\s*(?:\[[^\]]*\]\s*)?iteration\s+(?P<step>\d+)/\s*(?P<of>\d+) \|`,
		kind:       TrainerLog, fact: step,
	},
	{ // transformers/trainer.py: a dictionary of metrics tells no step. It stands before the slower pattern of losses.
		name:       "Trainer: metrics",
		literals:   []string{"'loss':"},
		expression: `^\{'loss': `,
		kind:       TrainerLog, fact: func(*match) Fact { return Progress{Step: -1, Metrics: true} },
	},
	{ // torchtitan/components/metrics.py, verl's console, mlx_lm/tuner/trainer.py, nanoGPT, and scripts of one's own
		name:     "step and loss",
		literals: []string{"loss", "Loss"},
		expression: `(?i:\b(?:global_?)?(?:step|iter|iteration)[ :=\[(]+(?P<step>\d+)(?: ?/ ?(?P<of>\d+))?\b` +
			`.*` + lossValue + `)`,
		kind: TrainerLog, fact: step,
	},
	{ // scripts of one's own, mmengine/hooks/logger_hook.py, ppocr/tools/program.py
		name:     "epoch and loss",
		literals: []string{"loss", "Loss"},
		expression: `(?i:^\W*(?:\w+ )?epochs?[ :=#\[(]+(?:train\)[ \[]+)?(?P<step>\d+)(?: ?/ ?(?P<of>\d+))?\b` +
			`.*` + lossValue + `)`,
		kind: TrainerLog,
		fact: func(m *match) Fact { return Progress{Step: int64(m.integer("step", -1)), Epoch: true} },
	},
	{ // ultralytics/engine/trainer.py: a row of its table
		name:       "Ultralytics: epoch",
		literals:   []string{"G  "},
		expression: `^\s+(?P<step>\d+)/(?P<of>\d+)\s+[\d.]+G\s+[\d.]+\s`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return Progress{Step: int64(m.integer("step", -1)), Epoch: true} },
	},
	{ // tqdm, as Trainer, Lightning, torchtune and transformers use it
		name:       "tqdm",
		literals:   []string{"%|"},
		expression: `^(?P<what>.*?):?\s*\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<of>\d+) \[`,
		kind:       TrainerLog, fact: progressBar,
	},
	{ // rich, as Lightning uses it
		name:       "rich progress bar",
		literals:   []string{"\u2501"},
		expression: `^Epoch \d+/\d+\s+[\x{2578}-\x{257A}\x{2501} ]*\s+(?P<step>\d+)/(?P<of>\d+) `,
		kind:       TrainerLog, fact: barStep,
	},
	{ // transformers, Megatron, DeepSpeed, Lightning, torchtitan, torchtune
		name: "saving",
		literals: []string{
			"Saving model checkpoint", "saving checkpoint at iteration", "[Torch] Saving",
			"Saving the checkpoint", "Saving model",
			"Model checkpoint of size", "Saving checkpoint", "Configuration saved in",
		},
		expression: `(?:Saving (?:model|the|a)? ?checkpoint|saving checkpoint at iteration\s+(?P<step>\d+)|\[Torch\] Saving|` +
			`Saving model(?: to)?|Model checkpoint of size)`,
		kind: TrainerLog, fact: inPhase(ledger.Checkpoint),
	},
	{ // transformers, Megatron, torchtitan
		name: "loading",
		literals: []string{"loading checkpoint from", "oading weights ", "Loading the checkpoint",
			"Loading model from"},
		expression: `(?:loading checkpoint from|[Ll]oading weights (?:file|from)|Loading the checkpoint|Loading model from)`,
		kind:       TrainerLog, fact: inPhase(ledger.Load),
	},
	{ // transformers/trainer.py
		name:       "Trainer: begins",
		literals:   []string{"***** Running training *****"},
		expression: `\*{5} Running training \*{5}`,
		kind:       TrainerLog, fact: func(*match) Fact { return Progress{Step: 0, Begins: true} },
	},
	{ // pytest, go test: the account of a suite that has passed
		name:     "tests passed",
		literals: []string{" passed", "ok  \t"},
		expression: `^=+ (?:\d+ (?:skipped|deselected|xfailed|xpassed|warnings?), )*\d+ passed(?:, \d+ (?:skipped|deselected|` +
			`xfailed|xpassed|warnings?))* in [\d.]+s|^ok  \t\S+\t`,
		kind: TrainerLog, fact: func(m *match) Fact { return ended("the trainer")(m) },
	},
	{ // mlperf_logging/mllog/constants.py: a run, as MLPerf's rules log it
		name:       "MLPerf: a run begins",
		literals:   []string{"::MLLOG"},
		expression: `::MLLOG .*"key": ?"init_start"`,
		kind:       TrainerLog, fact: func(*match) Fact { return Started{What: "a run of MLPerf"} },
	},
	{
		name:       "MLPerf: a run ended well",
		literals:   []string{"::MLLOG"},
		expression: `::MLLOG .*"key": ?"run_stop".*"status": ?"success"`,
		kind:       TrainerLog, fact: func(m *match) Fact { return ended("the trainer")(m) },
	},
	{
		name:       "MLPerf: progress",
		literals:   []string{"::MLLOG"},
		expression: `::MLLOG .*"(?:samples_count|step_num|epoch_num)": ?(?P<step>\d+)`,
		kind:       TrainerLog, fact: step,
	},
	{ // transformers/trainer.py, Lightning, fairseq, scripts of one's own, and the tests of pytest and CPython
		name: "training ended well",
		literals: []string{"'train_runtime':", "` reached.", "raining complete", "raining finished",
			"done training in", " passed", "Result: SUCCESS"},
		expression: "^\\{'train_runtime': |`Trainer\\.fit` stopped: `[^`]+` reached|done training in \\d|" +
			`^={3,} \d+ passed(?:, \d+ (?:skipped|deselected|xfailed|xpassed|warnings?))* in [\d.]+s.*={3,}$|` +
			`^Result: SUCCESS$|` +
			`[Tt]raining (?:(?:completed|finished) successfully|completed\. Do not forget to share|(?:complete|finished)[.!]?$)`,
		kind: TrainerLog, fact: func(m *match) Fact { return ended("the trainer")(m) },
	},
}

func step(m *match) Fact {
	return Progress{Step: int64(m.integer("step", -1)), Of: int64(m.integer("of", 0))}
}

func inPhase(phase ledger.PhaseName) func(*match) Fact {
	return func(m *match) Fact { return Progress{Phase: phase, Step: int64(m.integer("step", -1))} }
}

var (
	barOfSaving  = lazyregexp.New(`(?i)(?:writing|saving) (?:model )?(?:shards|weights|checkpoint)`)
	barOfLoading = lazyregexp.New(`(?i)loading .*(?:shards|weights|checkpoint)`)
	barOfSteps   = lazyregexp.New(`(?i)^(?:\s*|epoch \d+.*|train\w*.*|steps?.*|\d+\|\d+\|Loss: .*)$`)
)

// progressBar returns what the description of a bar says.
func progressBar(m *match) Fact {
	switch what := m.get("what"); {
	case barOfLoading.MatchString(what):
		return Progress{Phase: ledger.Load, Step: -1}
	case barOfSaving.MatchString(what):
		return Progress{Phase: ledger.Checkpoint, Step: -1}
	case barOfSteps.MatchString(what):
		return barStep(m)
	}
	return nil
}

func barStep(m *match) Fact {
	p, _ := step(m).(Progress)
	p.Bar = true
	return p
}

var memoryMetric = lazyregexp.New(`((?:before_init|init|train|eval|test)_mem_(?:cpu|gpu)_(?:alloc|peaked)_delta)` +
	`['"]?\s*[:=]\s*['"]?([\d.]+ ?[KMG]?B?)`)

// takeMemoryMetrics reads all metrics of a line. They are differences, and no levels.
func takeMemoryMetrics(r *reader, m *match) {
	values := map[string]int64{}
	for _, groups := range memoryMetric.FindAllStringSubmatch(m.whole, 100) {
		if size := sizeOf(groups[2], 1); size.Known {
			values[groups[1]] = int64(size.Bytes)
		}
	}
	if len(values) > 0 {
		r.emit(m, Counters{File: "Trainer's memory metrics", Values: values})
	}
}

// memoryUsage returns the usage in the groups tag, a, ma, c and mc.
func memoryUsage(by string, unit ledger.Bytes) func(*match) Fact {
	return func(m *match) Fact {
		return MemoryUsage{
			By: by, Tag: m.get("tag"), Allocated: m.size("a", unit), PeakAllocated: m.size("ma", unit),
			Reserved: m.size("c", unit), PeakReserved: m.size("mc", unit),
		}
	}
}

// usageAndStep is for lines that tell memory and the step.
func usageAndStep(by string, unit ledger.Bytes) func(*reader, *match) {
	return func(r *reader, m *match) {
		r.emit(m, memoryUsage(by, unit)(m))
		r.emit(m, Progress{Step: int64(m.integer("step", -1))})
	}
}

// memoryLines are the lines of one call of see_memory_usage.
type memoryLines struct {
	fact MemoryUsage
	at   text
}

// line returns false, as the lines have patterns of their own. A call has at most five lines.
func (b *memoryLines) line(r *reader, _ *text) bool { return false }

func (b *memoryLines) end(r *reader) { r.add(&b.at, b.fact) }

// beginMemory begins a call of see_memory_usage with its first line. The line before is the call's message.
func (r *reader) beginMemory(m *match, fact MemoryUsage) *memoryLines {
	if before := r.before(&m.text); before != nil {
		fact.Tag = strings.TrimSpace(before.string)
		if phase := phaseOf(fact.Tag); phase != "" {
			r.add(before, Progress{Phase: phase, Step: -1})
		}
	}
	b := &memoryLines{fact: fact, at: m.text}
	r.begin(m.stream, b)
	return b
}

// tags are the messages of DeepSpeed's calls of see_memory_usage, by phase.
var tags = []struct {
	expression *lazyregexp.Regexp
	phase      ledger.PhaseName
}{
	{lazyregexp.New(`(?i)forward`), ledger.Forward},
	{lazyregexp.New(`(?i)backward`), ledger.Backward},
	{lazyregexp.New(`(?i)\bstep\b|overflow|norm calculation`), ledger.Step},
	{lazyregexp.New(`(?i)initializ|creating fp|partition|moving param|zero.init|begin\b`), ledger.Initialize},
	{lazyregexp.New(`(?i)checkpoint|\bsav(?:e|ing)`), ledger.Checkpoint},
}

func phaseOf(tag string) ledger.PhaseName {
	if len(tag) > 200 {
		return ""
	}
	for i := range tags {
		if tags[i].expression.MatchString(tag) {
			return tags[i].phase
		}
	}
	return ""
}
