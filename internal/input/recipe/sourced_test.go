package recipe

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
)

// TestSourcedArguments: arguments may stand in a file that the script runs as a part of itself. Without the file the
// script is refused, and a variable that nothing sets is named.
func TestSourcedArguments(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if err = errors.Join(err, os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const launch = "torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL[@]} --seq-length 4096 $MORE\n"
	write("models/small.sh", "MODEL=(--num-layers 36 --hidden-size 2560)\n")
	for name, c := range map[string]struct {
		script       string
		layers       int64
		notes, wrong []string
	}{
		"from its own folder": {"source \"$(dirname \"$0\")/models/small.sh\"\n" + launch, 36,
			[]string{"models/small.sh is read as a part of the script", "$MORE counts as empty"}, nil},
		"from the folder of the script": {". models/small.sh\n" + launch, 36, nil, nil},
		"an environment that is elsewhere": {"source /opt/venv/bin/activate\nMODEL=(--num-layers 2)\n" + launch, 2,
			[]string{"$MORE counts as empty"}, nil},
		"the value of a flag": {"torchrun pretrain_gpt.py --num-layers 2 --hidden-size $SIZE\n", 0, nil,
			[]string{"hidden_size", "$SIZE"}},
		"missing": {"source models/large.sh\n" + launch, 0, nil,
			[]string{"run.sh:2:45", "${MODEL[@]} has arguments", "put models/large.sh where"}},
		"a folder that only a run knows": {"source $PLACE/models/small.sh\n" + launch, 0, nil,
			[]string{"${MODEL[@]} has arguments", "$PLACE/models/small.sh"}},
		"behind a condition": {"MODEL=(--num-layers 2)\n[ -f x ] && MORE='--recompute-granularity full'\n" + launch,
			0, nil, []string{"run.sh:3:75", "$MORE has arguments of the training behind the condition [ -f x ]",
				"set MORE by itself"}},
		"harmless behind a condition": {"MODEL=(--num-layers 2)\n[ -f x ] && MORE='--load x --wandb-project y'\n" +
			launch, 2, []string{"$MORE is left out behind the condition [ -f x ]"}, nil},
		"a value behind a condition": {"MODEL=(--num-layers 2)\nif grep -q H100 x; then MORE=2; else MORE=4; fi\n" +
			strings.ReplaceAll(launch, "$MORE", "--micro-batch-size $MORE"), 0, nil,
			[]string{"run.sh:3:94", "$MORE behind the condition grep -q H100 x"}},
	} {
		m, err := ReadMegatron(write("run.sh", c.script), nil)
		var wrong *fault.Input
		if errors.As(err, &wrong) {
			for _, words := range c.wrong {
				if !strings.Contains(wrong.Error()+wrong.Hint, words) {
					t.Errorf("%s: %v (%s) does not say %q", name, wrong, wrong.Hint, words)
				}
			}
		}
		if (err != nil) != (c.wrong != nil) {
			t.Errorf("%s: %v, expected %q", name, err, c.wrong)
		}
		if err != nil {
			continue
		}
		if m.Layers != c.layers {
			t.Errorf("%s: %d layers, expected %d", name, m.Layers, c.layers)
		}
		for _, note := range c.notes {
			if !strings.Contains(fmt.Sprint(m.Notes), note) {
				t.Errorf("%s: the notes %v do not say %q", name, m.Notes, note)
			}
		}
	}
}
