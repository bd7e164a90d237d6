package plan

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/autograd"
	"plimsoll/dtype"
	"plimsoll/forward"
	"plimsoll/model"
)

type measuredCase struct {
	Architecture string
	Arguments    struct {
		Config, Precision, Optimizer, Attention string
		Layers                                  int
		Batch                                   int64
		Seq_len                                 int64
		Implementation                          *string
		Gradient_checkpointing, Use_reentrant   bool
		Lora                                    *string
		Dropout                                 *float64
	}
	Phases []struct {
		Step  int
		Phase string
		Peak  int64
		End   int64
	}
}

func TestProbe(t *testing.T) {
	paths, _ := filepath.Glob("/tmp/measured/*-l4.json")
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		var c measuredCase
		if json.Unmarshal(text, &c) != nil || c.Arguments.Lora != nil {
			continue
		}
		a := c.Arguments
		raw, _ := os.ReadFile(a.Config)
		var config map[string]any
		json.Unmarshal(raw, &config)
		for _, k := range []string{"num_hidden_layers", "n_layer", "num_layers"} {
			if _, ok := config[k]; ok {
				config[k] = a.Layers
			}
		}
		if a.Dropout == nil || *a.Dropout == 0 {
			for _, k := range []string{"dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "attention_dropout", "hidden_dropout"} {
				if a.Dropout != nil {
					config[k] = 0
				}
			}
		}
		if c.Architecture != "" {
			config["architectures"] = []string{c.Architecture}
		}
		raw, _ = json.Marshal(config)
		file := filepath.Join(t.TempDir(), "config.json")
		os.WriteFile(file, raw, 0o600)
		m, err := model.Load(file)
		if err != nil {
			fmt.Println(path, err)
			continue
		}
		name := a.Optimizer
		o := optimizerKinds[name]
		o.Name = name
		o.Variant = Foreach
		if a.Implementation != nil {
			o.Variant = Variant(*a.Implementation)
		}
		j := &Job{Model: m, World: 1, SplitWidth: 1, SplitSequence: 1, SplitExperts: 1, MicroBatch: a.Batch, Sequence: a.Seq_len, Attention: forward.AttentionKind(a.Attention), Optimizer: o}
		switch a.Precision {
		case "bf16":
			j.Weights = dtype.BF16
		case "fp16":
			j.Weights = dtype.F16
		case "fp32":
			j.Weights = dtype.F32
		case "amp-bf16":
			j.Weights, j.Autocast = dtype.F32, dtype.BF16
		case "amp-fp16":
			j.Weights, j.Autocast = dtype.F32, dtype.F16
		}
		if a.Gradient_checkpointing {
			j.Recompute = &autograd.Checkpoint{Reentrant: a.Use_reentrant}
		}
		s := newSimulation(j, newTrace(nil), newTrace(nil))
		s.run()
		line := fmt.Sprintf("%-28s", strings.TrimSuffix(filepath.Base(path), "-l4.json"))
		for _, p := range c.Phases {
			iteration := map[int]Iteration{1: First, 2: Steady}[p.Step]
			for _, q := range s.gpu.phases {
				if string(q.Name) == p.Phase && q.Iteration == iteration && p.Step == 2 {
					line += fmt.Sprintf("  %s peak %+.2f%% end %+.2f%%", p.Phase[:3], 100*(float64(q.PeakRequested)/float64(p.Peak)-1), 100*(float64(q.EndRequested)/float64(p.End)-1))
				}
			}
		}
		fmt.Println(line)
	}
}
