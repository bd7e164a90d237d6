//go:build linux

package ghost

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/base/torchtest"
)

// held are storages: bytes, their number, and what made them.
type held struct {
	bytes, count int64
	by           string
}

func (h *held) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(text, &[]any{&h.bytes, &h.count, &h.by})
}

// live are the storages of programs at places of their run: after each forward pass, backward pass and step.
type live map[string]map[string][]held

func readLive(t *testing.T, output []byte) live {
	t.Helper()
	all := live{}
	for line := range strings.Lines(string(output)) {
		rest, isLive := strings.CutPrefix(line, "LIVE ")
		if name, text, found := strings.Cut(rest, " "); isLive && found {
			places := map[string][]held{}
			if err := json.Unmarshal([]byte(text), &places); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			name, _, _ = strings.Cut(name, "@") // without its ranks
			all[name] = places
		}
	}
	return all
}

// otherwise says why the host holds more storages of a size, or fewer, than the GPU that is not there.
type otherwise struct {
	program string
	bytes   int64
	more    int64
	why     string
}

const (
	readAhead = "the batch that accelerate reads ahead is on the host"
	schedule  = "the schedule of the noise is on the host"
	ofHost    = "the batch is on the host, too"
)

var alikeBut = []otherwise{
	{"checkpoints", 3072, 2, readAhead},
	{"checkpoints", 5056, 2, "checkpoints keep the state of the host's random numbers there"},
	{"lora", 3072, 2, readAhead},
	{"mixture", 3072, 2, readAhead},
	{"full", 3072, 2, readAhead},
	{"lightning", 49152, 1, "the data set is on the host"},
	{"sft", 3072, 3, readAhead},
	{"dpo", 3104, 3, readAhead},
	{"unet", 4000, 2, schedule},
	{"transformer", 4000, 2, schedule},
	{"titan_tensor", 3072, 1, ofHost},
	{"titan_pipeline", 3072, 1, ofHost},
}

// The programs of alike.py and of alike_trainers.py. The last of a test has one rank.
var (
	allAlike = []string{"checkpoints", "sharded@2", "loop", "lora", "zero@2", "zero3@2", "mixture", "full", "images",
		"eager", "lightning"}
	trainersAlike = []string{"dpo", "grpo", "unet", "transformer", "recipe_lora", "recipe", "titan_tensor@2", "sft"}
)

// everyAlike is whether programs run that are not run for every change. Some need an environment of their own, that of
// make test-ghost-all.
var everyAlike = os.Getenv("PLIMSOLL_ALIKE") == "all"

// TestAsOnTheHost holds programs on the stage to their real runs on the CPU: after each forward pass, backward pass and
// step, storages of the same sizes are held, as many of each.
func TestAsOnTheHost(t *testing.T) {
	whole(t)
	names := allAlike[:3]
	if everyAlike {
		names = allAlike
	}
	const modules = "transformers.trainer,transformers.models.llama.modeling_llama,peft,torch.distributed.fsdp"
	r := request(t, append([]string{"live.py", "testdata/alike.py", modules}, names...)...)
	compare(t, names, r, r.Command)
}

// TestTrainersAsOnTheHost is TestAsOnTheHost for TRL, diffusers, torchtune and torchtitan.
func TestTrainersAsOnTheHost(t *testing.T) {
	trainers(t)
	words := []string{"live.py", "testdata/alike_trainers.py", "transformers.trainer"}
	r := request(t, append(words, trainersAlike...)...)
	compare(t, trainersAlike, r, r.Command)
}

// TestPipelineAsOnTheHost is TestAsOnTheHost for two stages of a pipeline. On the stage both are played, as the first
// waits for what the second sends; so a launcher starts them.
func TestPipelineAsOnTheHost(t *testing.T) {
	trainers(t)
	r := request(t, "live.py", "testdata/alike_trainers.py", "transformers.trainer", "titan_pipeline")
	host := append(slices.Clone(r.Command[:len(r.Command)-1]), "titan_pipeline@2", "sft")
	r.Command = slices.Insert(r.Command, 1, "-m", "torch.distributed.run", "--nproc-per-node", "2")
	r.GPUs = 2
	compare(t, []string{"titan_pipeline"}, r, host)
}

func trainers(t *testing.T) {
	t.Helper()
	whole(t)
	if !everyAlike {
		t.Skip("make test-ghost-all runs it")
	}
	torchtest.Python(t, "trl", "diffusers", "torchtune", "torchtitan")
}

// compare runs programs on the stage and really, and compares what they hold.
func compare(t *testing.T, names []string, stage Request, command []string) {
	t.Helper()
	stage.Patience = 8 * time.Minute
	really := exec.CommandContext(t.Context(), command[0], command[1:]...)
	really.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES=", "TMPDIR="+t.TempDir())
	var output, said bytes.Buffer
	really.Stdout, really.Stderr = &output, &said
	if err := really.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := stage.Play(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, stage.Output)
	}
	if err := really.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, said.Bytes())
	}
	host, gpu := readLive(t, output.Bytes()), readLive(t, stage.Output.(*bytes.Buffer).Bytes())
	for _, name := range names {
		name, _, _ = strings.Cut(name, "@")
		if len(host[name]) != 6 || len(gpu[name]) != 6 {
			t.Errorf("%s has %d places on the host and %d on the GPU, want 6\n%s", name, len(host[name]),
				len(gpu[name]), said.Bytes())
		}
		for _, place := range slices.Sorted(maps.Keys(host[name])) {
			for _, line := range differences(name, host[name][place], gpu[name][place]) {
				t.Errorf("%s, %s: %s", name, place, line)
			}
		}
	}
}

// differences lists the sizes of which one side holds more storages than is known.
func differences(program string, host, gpu []held) (lines []string) {
	sums, makers := map[int64]int64{}, map[int64][]string{}
	add := func(side string, sign int64, all []held) {
		for _, h := range all {
			sums[h.bytes] += sign * h.count
			makers[h.bytes] = append(makers[h.bytes], fmt.Sprintf("%s: %d of %s", side, h.count, cmp.Or(h.by, "?")))
		}
	}
	add("host", 1, host)
	add("GPU", -1, gpu)
	for _, o := range alikeBut {
		if o.program == program && sums[o.bytes] == o.more {
			delete(sums, o.bytes)
		}
	}
	for _, size := range slices.Sorted(maps.Keys(sums)) {
		if sums[size] != 0 {
			lines = append(lines, fmt.Sprintf("the host has %+d of %d bytes (%s)", sums[size], size,
				strings.Join(makers[size], "; ")))
		}
	}
	return lines
}
