package evidence

import (
	"cmp"
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// The names of settings that logs show.
const (
	ExpandableSegments = "expandable_segments"
	SleepMode          = "sleep mode"
	TransformersMajor  = "transformers"
	Workers            = "num_workers"
	Nodes              = "nodes" // of the job
)

// settingPatterns are switches as programs print their arguments, and what shows that one is on. Advice leaves out what
// is on, and what cannot be used beside it.
var settingPatterns = []pattern{
	{ // PyTorch's variable, as a script exports it or a program prints its environment
		name:       "setting of the allocator",
		literals:   []string{"expandable_segments"},
		expression: `expandable_segments['"]?[:=] ?['"]?(?P<value>True|true|1)`,
		kind:       Unknown, picky: true,
		fact: func(m *match) Fact {
			if proposes(m.whole) {
				return nil
			}
			return Setting{ExpandableSegments, "true"}
		},
	},
	{ // arguments of trainers: transformers, DeepSpeed, and the dictionaries of others
		name:     "setting of a trainer",
		literals: []string{"gradient_checkpointing", "num_workers"},
		expression: `\b(?P<name>gradient_checkpointing|(?:dataloader_)?num_workers)['"]?(?: ?[:=] ?|\s{2,}|\.{3,} ?)` +
			`['"]?(?P<value>[Tt]rue|[Ff]alse|\d+)\b`,
		kind: Unknown, picky: true,
		fact: func(m *match) Fact {
			if proposes(m.whole) {
				return nil
			}
			return Setting{strings.TrimPrefix(m.get("name"), "dataloader_"), strings.ToLower(m.get("value"))}
		},
	},
	{ // torchrun, deepspeed/launcher/launch.py, accelerate, Lightning; LLaMA-Factory's launcher
		name:     "number of nodes",
		literals: []string{"nnodes", "num_machines", "num_nodes", "--standalone", "distributed tasks at: "},
		expression: `--standalone\b|\b(?:nnodes|num_machines|num_nodes)['"]?(?: ?[:=] ?| )['"]?(?:\d+:)?(?P<nodes>\d+)\b|` +
			`Initializing \d+ distributed tasks at: (?:127\.0\.0\.1|localhost):`,
		kind: Unknown, picky: true,
		fact: func(m *match) Fact {
			if proposes(m.whole) {
				return nil
			}
			return Setting{Nodes, cmp.Or(m.get("nodes"), "1")}
		},
	},
	{ // vllm/v1/worker/gpu_worker.py
		name:       "an engine has slept",
		literals:   []string{"Sleep mode freed"},
		expression: `\bSleep mode freed (?P<freed>[\d.]+ [KMG]iB) memory, (?P<left>[\d.]+ [KMG]iB) memory is still in`,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			r.emit(m, Setting{SleepMode, "true"})
			r.emit(m, EngineSlept{m.size("freed", 1), m.size("left", 1)})
		},
	},
	{ // vllm/device_allocator/cumem.py, vllm/v1/worker/gpu_worker.py, torch_memory_saver
		name: "an engine sleeps",
		literals: []string{"CuMemAllocator", "Sleep mode freed", "fall asleep", "torch_memory_saver",
			"enable_sleep_mode"},
		expression: `\bCuMemAllocator: sleep|\bSleep mode freed|\bto fall asleep\b|\btorch_memory_saver\b|` +
			`\benable_sleep_mode['"]?[:=] ?True`,
		kind: Unknown, picky: true,
		fact: func(m *match) Fact {
			if isError(m.whole) {
				return nil
			}
			return Setting{SleepMode, "true"}
		},
	},
	{ // transformers: what a configuration and a trainer print of the release
		name:       "release of transformers",
		literals:   []string{"ransformers"},
		expression: `\b[Tt]ransformers(?: version|_version)?['"]?(?:==|[ :=-]+)['"]?v?(?P<major>\d+)\.\d+`,
		kind:       Unknown, picky: true,
		fact: func(m *match) Fact {
			if isError(m.whole) {
				return nil
			}
			return Setting{TransformersMajor, m.get("major")}
		},
	},
}

func proposes(line string) bool { return proposal.MatchString(line) || isError(line) }

// proposal are words of lines that propose a setting, or ask for it.
var proposal = lazyregexp.New(`(?i)\b(?:try|set(?:ting)?|consider|recommend\w*|suggest\w*|` +
	`incompatible|not supported|warn\w*)\b`)
