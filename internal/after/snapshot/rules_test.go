package snapshot

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
)

// TestRulesNameRealFunctions looks for the functions of the rules in the installed packages: frameworks rename theirs.
func TestRulesNameRealFunctions(t *testing.T) {
	folder := strings.TrimSpace(string(runPython(t,
		"import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))")))
	definition := regexp.MustCompile(`(?m)^ *(?:async )?def (\w+)`)
	functions := map[string][]string{} // by file
	for _, name := range []string{
		"torch/optim", "torch/nn", "torch/distributed/fsdp", "torch/distributed/checkpoint",
		"torch/distributed/utils.py",
		"torch/autograd", "torch/utils", "torch/serialization.py", "transformers/modeling_utils.py",
		"transformers/core_model_loading.py", "transformers/modeling_flash_attention_utils.py",
		"transformers/trainer.py", "transformers/data", "transformers/integrations", "transformers/loss",
		"transformers/models/llama", "accelerate/utils", "deepspeed/ops", "deepspeed/runtime",
	} {
		err := filepath.WalkDir(filepath.Join(folder, name), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".py") {
				return err
			}
			text, err := files.Read(path, 16<<20)
			for _, match := range definition.FindAllStringSubmatch(string(text), -1) {
				functions[path] = append(functions[path], match[1])
			}
			return err
		})
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	absent := regexp.MustCompile(`^(bitsandbytes|apex|megatron|peft)|::|Handle`) // not installed, or functions of C++
	checked := 0
	for _, rule := range append(slices.Clone(rules), recomputing) {
		if absent.MatchString(rule.file) || absent.MatchString(rule.function) {
			continue
		}
		checked++
		compiled, found := rule.compiled(), false
		for path, names := range functions {
			for _, name := range names {
				found = found || compiled.matches(path, name)
			}
		}
		if !found {
			t.Errorf("no installed package has a function %q in a file %q", rule.function, rule.file)
		}
	}
	if checked < 30 {
		t.Errorf("only %d rules were checked", checked)
	}
}

// TestRules checks the components of stacks, the innermost frame first.
func TestRules(t *testing.T) {
	const site = "/x/site-packages/"
	type at struct{ file, function string }
	linear := at{site + "torch/nn/modules/linear.py", "forward"}
	for _, test := range []struct {
		stack    []at
		expected ledger.Component
	}{
		{nil, ledger.Unattributed},
		{[]at{{"train.py", "main"}}, ledger.Unattributed},
		{[]at{linear, {"train.py", "main"}}, ledger.Activations},
		{[]at{linear, {site + "torch/utils/checkpoint.py", "recompute_fn"}}, ledger.RecomputedActivations},
		{[]at{{site + "torch/optim/adamw.py", "_init_group"}, {"train.py", "main"}}, ledger.OptimizerStates},
		// A closure: the forward pass within optimizer.step.
		{[]at{linear, {site + "torch/optim/lbfgs.py", "step"}}, ledger.Activations},
		{[]at{{site + "torch/optim/sgd.py", "_multi_tensor_sgd"}}, ledger.Unattributed},
		{[]at{{site + "torch/nn/modules/module.py", "convert"}, {"train.py", "forward"}}, ledger.Parameters},
		{[]at{{`C:\Python\site-packages\torch\nn\modules\module.py`, "convert"}}, ledger.Parameters},
		{[]at{{site + "torch/nn/functional.py", "cross_entropy"}, {"model.py", "forward"}}, ledger.LogitsAndLoss},
		{[]at{{"??", "at::empty"}, {"??", "torch::autograd::AccumulateGrad::apply(...)"},
			{"??", "torch::autograd::Engine::evaluate_function(...)"}}, ledger.Gradients},
		{[]at{{"??", "at::empty"}, {"??", "torch::autograd::Engine::thread_init(...)"}}, ledger.BackwardPass},
	} {
		r := newRecords()
		b := &budget{baseBudget}
		var frames []uint32
		for _, f := range test.stack {
			frame := Frame{file: r.texts.number(b, []byte(f.file)), name: r.texts.number(b, []byte(f.function))}
			frames = append(frames, r.frames.number(b, frame))
		}
		if got := newClassifier(r).of(r.stacks.number(b, frames)); got != test.expected {
			t.Errorf("%v: %s, expected %s", test.stack, got, test.expected)
		}
	}
}
