package recipe

import (
	"strings"
	"testing"
)

// TestAbbreviations reads the arguments of a command as transformers' HfArgumentParser does: names may be cut short,
// no_ turns a switch off, and the last argument of a name counts.
func TestAbbreviations(t *testing.T) {
	const launch = "accelerate launch --num_processes 2 sft.py --model_name_or_path Qwen/Qwen3-8B --output_dir o "
	for arguments, want := range map[string]struct {
		batch, steps int64
		checkpoints  bool
		wrong        string
	}{
		"--per_device_train_b 3 --gradient_acc=4":                                       {3, 4, true, ""},
		"--per_device_train_batch_size 3 --per_device_tr 5":                             {5, 1, true, ""},
		"--per_device_tr 5 --per_device_train_batch_size 3 --no-gradient-checkpointing": {3, 1, false, ""},
		"--per_device_tr 5 --no_gradient_checkpointing":                                 {5, 1, false, ""},
		"--per_device_tr 5 --no-gradient-checkpointing --gradient_checkpointi":          {wrong: "names of 2"},
		"--gradient 4":       {0, 0, false, "gradient_accumulation_steps, gradient_checkpointing"},
		"--notakey_at_all 4": {8, 1, true, ""},
		"--no_padding_f":     {8, 1, true, ""},
	} {
		f, err := readAs(t, "train.sh", launch+arguments+"\n")
		if want.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), want.wrong) {
				t.Errorf("%s: error %v, want %q", arguments, err, want.wrong)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", arguments, err)
			continue
		}
		if got := f.Training; int64(got.MicroBatch) != want.batch || int64(got.GradientAccumulation) != want.steps ||
			got.Checkpointing.Enabled != want.checkpoints {
			t.Errorf("%s: batch %d, %d steps, checkpoints %t, want %+v", arguments, got.MicroBatch,
				got.GradientAccumulation, got.Checkpointing.Enabled, want)
		}
	}
}
