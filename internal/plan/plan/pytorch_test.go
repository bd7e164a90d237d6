package plan

import (
	"encoding/json"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// trial is a training that is planned, and run by scripts/measure/train.py with
// real PyTorch and transformers.
type trial struct {
	name    string
	config  string // a model of the catalog
	layers  int
	batch   int
	length  int
	untied  bool   // the head has a weight of its own
	adapter string // an adapter_config.json
	flags   string // flags of the script
	request job.Request
}

// measurement is the output of the script.
type measurement struct {
	Versions map[string]string
	Phases   []struct {
		Step      int
		Phase     string
		Peak, End ledger.Bytes
		Host      *struct {
			Peak     int64 `json:"rss_peak"`
			Resident int64 `json:"rss"`
		}
	}
}

// command returns the script and its arguments.
func (c trial) command(t *testing.T, device string) []string {
	t.Helper()
	arguments := []string{"../../../scripts/measure/train.py",
		"--config", "../../input/model/catalog/" + c.config + ".json",
		"--device", device, "--layers", strconv.Itoa(c.layers),
		"--batch", strconv.Itoa(c.batch), "--seq-len", strconv.Itoa(c.length), "--steps", "2", "--json"}
	if c.adapter != "" {
		arguments = append(arguments, "--lora", c.adapterFile(t))
	}
	return append(arguments, strings.Fields(c.flags)...)
}

// imported is the interpreter that the tests of this package share.
var imported = torchtest.Forked("torch", "transformers.models.llama.modeling_llama", "peft", "accelerate")

func (c trial) adapterFile(t *testing.T) string {
	file := filepath.Join(t.TempDir(), "adapter_config.json")
	if err := os.WriteFile(file, []byte(c.adapter), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// shallow returns the path of a config.json: that of a model of the catalog, with some layers of it.
func shallow(t *testing.T, name string, layers int, changes map[string]any) string {
	t.Helper()
	text, err := os.ReadFile("../../input/model/catalog/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	var config map[string]any
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"num_hidden_layers", "n_layer", "num_layers"} {
		if _, ok := config[key]; ok {
			config[key] = layers
		}
	}
	maps.Copy(config, changes)
	if text, err = json.Marshal(config); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// plan returns the plan of the same training.
func (c trial) plan(t *testing.T, torch, transformers string) *Plan {
	t.Helper()
	q, changes := c.request, map[string]any{}
	if c.untied {
		changes["tie_word_embeddings"] = false
	}
	q.Model = shallow(t, c.config, c.layers, changes)
	if c.adapter != "" {
		q.Adapter = c.adapterFile(t)
	}
	q.MicroBatch, q.Sequence, q.Torch, q.Transformers = c.batch, c.length, torch, transformers
	j, err := q.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	unheld(j)
	p, err := New(j)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// unheld makes a job that is compared with a script: the script holds no outputs, and what kernels work in is not
// measured.
func unheld(j *job.Job) {
	j.HoldsOutputs = false
	j.Settle()
	j.Kernels.GPU = forward.GPU{}
}

// without returns the peak and the end of a phase without a component.
func without(p *ledger.Phase, name ledger.Component) (peak, end ledger.Bytes) {
	peak, end = p.PeakRequested, p.EndRequested
	for _, c := range p.Components {
		if c.Component == name {
			peak -= c.Bytes
		}
	}
	for _, c := range p.End {
		if c.Component == name {
			end -= c.Bytes
		}
	}
	return peak, end
}

const loraOfQueriesAndValues = `{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, ` +
	`"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}`

// TestAgainstPyTorch compares the plan's requested bytes with real PyTorch and
// transformers. Their tensors are on a fake GPU and have no memory. Memory inside
// kernels (cuBLAS' workspaces) is not measured.
func TestAgainstPyTorch(t *testing.T) {
	for _, c := range []trial{
		{name: "llama", config: "llama-3.2-1b", layers: 3, batch: 2, length: 384, flags: "--precision bf16 --clip 1",
			request: job.Request{Precision: "bf16"}},
		{name: "recomputed", config: "llama-3.2-1b", layers: 3, batch: 1, length: 512,
			flags:   "--precision bf16 --gradient-checkpointing --fused",
			request: job.Request{Precision: "bf16", Recompute: "full", Optimizer: "adamw/fused"}},
		{name: "autocast", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 256,
			flags:   "--precision amp-bf16 --for-loop",
			request: job.Request{Precision: "amp-bf16", Optimizer: "adamw/for-loop"}},
		{name: "eager", config: "gpt2", layers: 4, batch: 4, length: 512, flags: "--precision fp32 --attention eager",
			request: job.Request{Precision: "fp32", Attention: "eager"}},
		{name: "lora", config: "qwen2.5-0.5b", layers: 4, batch: 2, length: 512, adapter: loraOfQueriesAndValues,
			flags: "--precision bf16", request: job.Request{Precision: "bf16"}},
		{name: "copied modules", config: "qwen2.5-0.5b", layers: 4, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ` +
				`["embed_tokens"]}`},
		{name: "adapted embedding", config: "llama-3.2-1b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj", "embed_tokens"]}`},
		{name: "adalora", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "ADALORA", "init_r": 12, "target_r": 8, "total_step": 100, "target_modules": ` +
				`["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1}`},
		{name: "dora", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LORA", "r": 8, "use_dora": true, "target_modules": ["q_proj", "v_proj", ` +
				`"down_proj"], "lora_dropout": 0.1}`},
		{name: "ia3", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "IA3", "target_modules": ["k_proj", "v_proj", "down_proj"], ` +
				`"feedforward_modules": ["down_proj"]}`},
		{name: "vera", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "VERA", "r": 64, "target_modules": ["q_proj", "v_proj", "down_proj"]}`},
		{name: "oft", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "OFT", "oft_block_size": 128, "target_modules": "all-linear"}`},
		{name: "oft under autocast", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512,
			flags: "--precision amp-bf16", request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "OFT", "r": 7, "oft_block_size": 0, "num_cayley_neumann_terms": 6, ` +
				`"target_modules": ["q_proj", "v_proj", "down_proj"]}`},
		{name: "one block of oft", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "OFT", "oft_block_size": 64, "block_share": true, "use_cayley_neumann": false, ` +
				`"target_modules": ["q_proj", "up_proj"]}`},
		{name: "loha", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LOHA", "r": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}`},
		{name: "loha under autocast", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512,
			flags: "--precision amp-bf16", request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "LOHA", "r": 16, "target_modules": "all-linear"}`},
		{name: "lokr", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "LOKR", "r": 8, "decompose_factor": 4, "target_modules": ["q_proj", "v_proj", ` +
				`"down_proj"]}`},
		{name: "lokr, both of low rank", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512,
			flags: "--precision amp-bf16", request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "LOKR", "r": 4, "decompose_both": true, "target_modules": ["q_proj", "up_proj"]}`},
		{name: "miss", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"},
			adapter: `{"peft_type": "MISS", "r": 60, "miss_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}`},
		{name: "mini miss", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision amp-bf16",
			request: job.Request{Precision: "amp-bf16"},
			adapter: `{"peft_type": "MISS", "r": 64, "mini_r": 32, "init_weights": "mini", "target_modules": ["q_proj", ` +
				`"v_proj"]}`},
		{name: "prompt tuning", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"}, adapter: `{"peft_type": "PROMPT_TUNING", ` +
				`"num_virtual_tokens": 64, "task_type": "CAUSAL_LM"}`},
		{name: "p-tuning", config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 512, flags: "--precision amp-bf16",
			request: job.Request{Precision: "amp-bf16"}, adapter: `{"peft_type": "P_TUNING", "num_virtual_tokens": 32, ` +
				`"encoder_hidden_size": 512, "task_type": "CAUSAL_LM"}`},
		{name: "mixture", config: "qwen3-30b-a3b", layers: 2, batch: 1, length: 1024, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"}},
		{name: "mixture under autocast", config: "mixtral-8x7b", layers: 1, batch: 1, length: 512,
			flags:   "--precision amp-bf16 --optimizer sgd",
			request: job.Request{Precision: "amp-bf16", Optimizer: "sgd"}},
		{name: "adapted experts", config: "qwen3-30b-a3b", layers: 2, batch: 1, length: 512,
			flags: "--precision bf16", request: job.Request{Precision: "bf16"}, adapter: `{"peft_type": "LORA", "r": 8, ` +
				`"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}`},
		{name: "converted targets", config: "qwen3-30b-a3b", layers: 1, batch: 1, length: 512,
			flags:   "--precision amp-bf16 --gradient-checkpointing",
			request: job.Request{Precision: "amp-bf16", Recompute: "full"},
			adapter: `{"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}`},
		{name: "mixture with shared experts", config: "deepseek-v2-lite", layers: 3, batch: 1, length: 512,
			flags: "--precision bf16", request: job.Request{Precision: "bf16"}},
		{name: "encoder and decoder", config: "t5-small", layers: 3, batch: 2, length: 256, flags: "--precision bf16",
			request: job.Request{Precision: "bf16"}},
		{name: "muon", config: "llama-3.2-1b", layers: 3, batch: 1, length: 256,
			flags:   "--precision bf16 --optimizer muon",
			request: job.Request{Precision: "bf16", Optimizer: "muon"}},
		{name: "muon under autocast", config: "qwen2.5-0.5b", layers: 3, batch: 1, length: 256,
			flags:   "--precision amp-bf16 --optimizer muon --for-loop",
			request: job.Request{Precision: "amp-bf16", Optimizer: "muon/for-loop"}},
		{name: "partial rotary", config: "gpt-neox-20b", layers: 2, batch: 1, length: 512,
			flags: "--precision bf16 --optimizer sgd", request: job.Request{Precision: "bf16", Optimizer: "sgd"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := torchtest.Answer[measurement](t, imported, c.command(t, "fake")...)
			p := c.plan(t, m.Versions["torch"], m.Versions["transformers"])
			for _, measured := range m.Phases {
				iteration := map[int]ledger.Iteration{1: ledger.First, 2: ledger.Steady}[measured.Step]
				for i := range p.Devices[0].Phases {
					phase := &p.Devices[0].Phases[i]
					if string(phase.Name) != measured.Phase || phase.Iteration != iteration ||
						iteration == ledger.Once {
						continue
					}
					peak, end := without(phase, ledger.MatmulWorkspaces)
					if phase.Name == ledger.Step { // the script's loop has dropped the gradients
						_, end = end, measured.End
					}
					for what, pair := range map[string][2]ledger.Bytes{"peak": {peak, measured.Peak},
						"end": {end, measured.End}} {
						if off := float64(pair[0])/float64(pair[1]) - 1; math.Abs(off) > 0.003 {
							t.Errorf("%s %s, %s: planned %v, PyTorch %v (%+.2f %%)",
								iteration, phase.Name, what, pair[0].Exact(), pair[1].Exact(), 100*off)
						}
					}
				}
			}
		})
	}
}

// TestHostMemoryOnCPU trains on the CPU, with real memory. The plan predicts the
// resident memory at the peak and at the end of every phase within 3 %, free
// memory that malloc keeps included.
func TestHostMemoryOnCPU(t *testing.T) {
	c := trial{config: "qwen2.5-0.5b", layers: 3, batch: 2, length: 256, flags: "--precision fp32",
		request: job.Request{CPU: true, Precision: "fp32"}}
	fresh := torchtest.Fresh("torch", "transformers") // whose memory is its own
	m := torchtest.Measured[measurement](t, fresh, c.command(t, "cpu")...)
	p := c.plan(t, m.Versions["torch"], m.Versions["transformers"])
	host := &p.Devices[0]
	compared := 0
	for _, measured := range m.Phases {
		iteration := map[int]ledger.Iteration{1: ledger.First, 2: ledger.Steady}[measured.Step]
		for i := range host.Phases {
			phase := &host.Phases[i]
			if string(phase.Name) != measured.Phase || phase.Iteration != iteration {
				continue
			}
			process := phase.PeakUsed - phase.PeakReserved
			figures := map[string][2]float64{}
			if phase.Name != ledger.Load { // the script makes random weights, which have another peak
				figures["peak"] = [2]float64{float64(phase.PeakUsed), float64(measured.Host.Peak)}
			}
			if phase.Name != ledger.Step { // the script's loop has dropped the gradients
				// Not the proportional set size: other processes share torch's
				// libraries.
				figures["end"] = [2]float64{float64(phase.EndReserved + process), float64(measured.Host.Resident)}
			}
			for what, pair := range figures {
				compared++
				off := pair[0]/pair[1] - 1
				t.Logf("%s %s, %s: planned %v, measured %v (%+.2f %%)",
					iteration, phase.Name, what, ledger.Bytes(pair[0]), ledger.Bytes(pair[1]), 100*off)
				if math.Abs(off) > 0.03 {
					t.Errorf("%s %s, %s: planned %v, measured %v (%+.2f %%)",
						iteration, phase.Name, what, ledger.Bytes(pair[0]), ledger.Bytes(pair[1]), 100*off)
				}
			}
		}
	}
	if compared < 10 {
		t.Errorf("only %d figures were compared", compared)
	}
}
