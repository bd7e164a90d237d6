//go:build linux

package checkpoint

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// readSafetensors reads files with the library of Hugging Face.
const readSafetensors = `
import sys, torch
from safetensors import safe_open
for path in sys.argv[1:]:
    with safe_open(path, framework="pt") as f:
        print("metadata", f.metadata()["format"], f.metadata()["step"])
        for name in f.keys():
            t = f.get_tensor(name)
            print(name, str(t.dtype).removeprefix("torch."), list(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex())
`

// TestSafetensorsReadsTheFiles: its tensors are the arenas, cut into the
// parameters.
func TestSafetensorsReadsTheFiles(t *testing.T) {
	var paths []string
	want := map[string]int{}
	for _, f := range []kernel.Format{
		shardtest.SplitFormat,
		shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsBF16, dtype.F16),
		shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsInt8, dtype.BF16),
		shardtest.Format(kernel.SGD, kernel.FP32, kernel.MomentsFP32, dtype.F32),
	} {
		job := newJob(t, f, 700, shardtest.CutModel(shardtest.SmallModel, shardtest.Mixed(f.Moments), 9000))
		train(t, job, 1, 2)
		path := save(t, t.TempDir(), job, "")
		for _, s := range job {
			file := filepath.Join(path, fileName(s.Rank, s.World, s.Part)+dataSuffix)
			paths = append(paths, file)
			want[fmt.Sprintf("metadata pt %d", s.State.Steps())]++
			addTensors(want, s)
		}
	}
	out, err := torchtest.Imported(t, "safetensors.torch").Output(append([]string{"-c", readSafetensors}, paths...)...)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		if want[line]--; want[line] < 0 {
			t.Errorf("%.100s is not what was saved", line)
		}
	}
	for line, missing := range want {
		if missing > 0 {
			t.Errorf("%.100s is in no file", line)
		}
	}
}

// addTensors lists the tensors of a shard as the program prints them.
func addTensors(lines map[string]int, s Shard) {
	at := map[ledger.Component]int64{} // of each arena
	line := func(name string, arena ledger.Component, kind, shape string, size, count int64) {
		bytes := s.State.Arena(arena).Bytes()[at[arena] : at[arena]+size*count]
		at[arena] += size * count
		lines[fmt.Sprintf("%s %s %s %x", name, kind, shape, bytes)]++
	}
	momentType := []string{"float32", "bfloat16", "uint8"}
	for _, p := range s.Pieces {
		name, shape := p.Name, strings.ReplaceAll(fmt.Sprint(p.Shape), " ", ", ")
		if n, _ := p.Elements(); n != p.Count {
			name, shape = fmt.Sprintf("%s[%d:%d]", name, p.First, p.First+p.Count), fmt.Sprintf("[%d]", p.Count)
		}
		if s.Format.State == kernel.Split {
			line(name, "parameters", "bfloat16", shape, 2, p.Count)
			line(name+"/master_weights_low", "master_weights_low", "uint16", shape, 2, p.Count)
		} else {
			line(name+"/master_weights", "master_weights", "float32", shape, 4, p.Count)
		}
		for _, component := range map[kernel.Algorithm][]ledger.Component{kernel.Adam: {"exp_avg", "exp_avg_sq"},
			kernel.SGD: {"momentum_buffer"}}[s.Format.Algorithm] {
			arena := component
			if p.Moments != s.Format.Moments {
				arena = arena.InType(p.Moments.String())
			}
			line(name+"/"+string(component), arena, momentType[p.Moments], shape, p.Moments.Size(), p.Count)
		}
	}
	if headers := s.State.Arena("moment_headers"); headers != nil {
		count := int64(headers.Size()) / 2
		line("moment_headers", "moment_headers", "uint16", fmt.Sprintf("[%d]", count), 2, count)
	}
}
