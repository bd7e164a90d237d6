package recipe

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/files"
)

// sizes are arguments that say what is trained.
const sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"

// TestReviseScript changes an argument of a script. Only the lines of the argument change.
func TestReviseScript(t *testing.T) {
	array := "#!/bin/bash\n# --micro-batch-size 9\nARGS=(\n    " + sizes + "\n    --micro-batch-size 4\n    --bf16\n" +
		")\ntorchrun pretrain_gpt.py ${ARGS[@]}\n"
	lines := "torchrun pretrain_gpt.py \\\n    " + sizes + " \\\n    --micro-batch-size 4 \\\n    --bf16\n"
	with := func(text, by string) string { return strings.Replace(text, "--micro-batch-size 4", by, 1) }
	const micro = "--micro-batch-size"
	for name, c := range map[string]struct {
		text    string
		setting Setting
		to      any
		want    string // the changed lines, without what stays; the script as it is for none
	}{
		"a value in an array":         {array, MicroBatch, 2, "    " + micro + " 2\n"},
		"a value of a command":        {lines, MicroBatch, 2, "    " + micro + " 2 \\\n"},
		"a new argument in an array":  {array, RecomputeGranularity, "full", "    --recompute-granularity full\n"},
		"a new argument of a command": {lines, SequenceSplit, true, "    --sequence-parallel \\\n"},
		"an argument that is there":   {array, MicroBatch, 4, ""},
		"an equals sign":              {with(lines, micro+"=4"), MicroBatch, 2, "    " + micro + "=2 \\\n"},
		"a quoted value":              {with(lines, micro+` "4"`), MicroBatch, 2, "    " + micro + " \"2\" \\\n"},
		"underscores": {with(lines, "--micro_batch_size 4"), MicroBatch, 2,
			"    --micro_batch_size 2 \\\n"},
		"a variable": {"MICRO=4\n" + with(lines, micro+" $MICRO"), MicroBatch, 2, "MICRO=2\n"},
		"a variable with a default": {"MICRO=${1:-4}\n" + with(lines, micro+" ${MICRO}"), MicroBatch, 2,
			"MICRO=${1:-2}\n"},
		"a variable that others follow": {"M=4\n" + with(lines, micro+" $M --global-batch-size $((${M}*8))"),
			MicroBatch, 2, "    " + micro + " 2 --global-batch-size $((${M}*8)) \\\n"},
		"a text of arguments": {"ARGS=\"" + sizes + " \\\n  " + micro + " 4 \\\n  --bf16\"\n" +
			"python pretrain_gpt.py $ARGS\n", MicroBatch, 2, "  " + micro + " 2 \\\n"},
		"a new one in a text": {"ARGS=\"" + sizes + "\n  " + micro + " 4\"\npython pretrain_gpt.py $ARGS\n",
			SequenceSplit, true, "  --sequence-parallel\n"},
		"a list": {sizes + "\n" + micro + " 4\n", MicroBatch, 2, micro + " 2\n"},
		"a command inside": {"#!/bin/bash\nsrun bash -c \"python pretrain_gpt.py " + sizes + " \\\n" + micro + " 4\"\n",
			MicroBatch, 2, micro + " 2\"\n"},
	} {
		got, err := revised("train.sh", c.text, c.setting, c.to)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var changed string
		for line := range strings.Lines(got) {
			if !strings.Contains(c.text, line) {
				changed += line
			}
		}
		if changed != c.want {
			t.Errorf("%s: %s", name, cmp.Diff(c.want, changed))
		}
	}
}

// TestReviseScriptRemoves leaves arguments out, and puts nothing in their place.
func TestReviseScriptRemoves(t *testing.T) {
	for _, text := range []string{
		"ARGS=(\n  " + sizes + "\n  --recompute-granularity full\n  --bf16\n)\ntorchrun pretrain_gpt.py ${ARGS[@]}\n",
		"torchrun pretrain_gpt.py \\\n  " + sizes + " \\\n  --recompute-granularity full \\\n  --bf16\n",
		"torchrun pretrain_gpt.py \\\n  " + sizes + " \\\n  --bf16 --recompute-granularity full\n",
	} {
		got, err := revised("train.sh", text, RecomputeGranularity, nil)
		if err != nil || strings.Contains(got, "recompute") || !strings.Contains(got, "--bf16") {
			t.Errorf("%v: %s", err, got)
		}
	}
}

// TestReviseScriptRefuses: what cannot be changed without another argument is not edited.
func TestReviseScriptRefuses(t *testing.T) {
	for _, text := range []string{
		"#!/bin/bash\nP=--micro\npython pretrain_gpt.py " + sizes + " ${P}-batch-size 4\n",
		"#!/bin/bash\npython pretrain_gpt.py " + sizes + " \"--micro-batch\"-size 4\n",
	} {
		got, err := revised("train.sh", text, MicroBatch, 2)
		if !errors.As(err, new(*NotEditable)) {
			t.Errorf("%v: %s", err, got)
		}
	}
}

// TestReviseArgumentsInYAML writes keys as the file does.
func TestReviseArgumentsInYAML(t *testing.T) {
	for text, want := range map[string]string{
		"MODEL_ARGS:\n  --num-layers: 2\n  --micro-batch-size: 4\n": "  --recompute-granularity: full\n",
		"num_layers: 2\nmicro_batch_size: 4\n":                      "recompute_granularity: full\n",
		"num-layers: 2\nmicro-batch-size: 4\n":                      "recompute-granularity: full\n",
	} {
		got, err := revised("train.yaml", text, RecomputeGranularity, "full")
		if err != nil || !strings.Contains(got, want) {
			t.Errorf("%v: %s", err, got)
		}
		got, err = revised("train.yaml", text, MicroBatch, 2)
		if err != nil || got != strings.Replace(text, "4", "2", 1) {
			t.Errorf("%v: %s", err, got)
		}
	}
}

func revised(name, text string, setting Setting, to any) (string, error) {
	s, err := LoadSettings(name, files.Texts{name: []byte(text)})
	if err != nil {
		return "", err
	}
	r, _, err := s.Revise(setting, to)
	if err != nil {
		return "", err
	}
	_, err = s.With(r.Text)
	return string(r.Text), err
}

// FuzzReviseScript: a script is edited so that it says the new value and nothing else has changed, or not at all.
func FuzzReviseScript(f *testing.F) {
	f.Add("#!/bin/bash\nM=${1:-4}\nARGS=(\n  "+sizes+"\n  --micro-batch-size $M\n)\n"+
		"torchrun pretrain_gpt.py ${ARGS[@]}\n", 2)
	f.Add(sizes+" --micro-batch-size=\"4\" --bf16\n", 1)
	f.Fuzz(func(t *testing.T, text string, to int) {
		s, err := LoadSettings("train.sh", files.Texts{"train.sh": []byte(text)})
		if err != nil || s == nil || !s.isScript {
			return
		}
		for _, c := range []struct {
			setting Setting
			to      any
		}{{MicroBatch, to}, {SequenceSplit, true}} {
			r, _, err := s.Revise(c.setting, c.to)
			if err != nil {
				continue
			}
			again, err := s.With(r.Text)
			if err != nil {
				t.Fatalf("%q becomes %q: %v", text, r.Text, err)
			}
			if !again.document.Root.Same(ArgumentOf(c.setting, c.to).in(s.document.Root)) {
				t.Errorf("%q becomes %q", text, r.Text)
			}
		}
	})
}
