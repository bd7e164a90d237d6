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

var alikeBut = []otherwise{
	{"checkpoints", 3072, 2, "the batch that accelerate reads ahead is on the host"},
	{"checkpoints", 5056, 2, "checkpoints keep the state of the host's random numbers there"},
	{"lora", 3072, 2, "the batch that accelerate reads ahead is on the host"},
	{"mixture", 3072, 2, "the batch that accelerate reads ahead is on the host"},
	{"full", 3072, 2, "the batch that accelerate reads ahead is on the host"},
	{"lightning", 49152, 1, "the data set is on the host"},
}

// allAlike are the programs of alike.py. The last of a test has one rank.
var allAlike = []string{"checkpoints", "sharded@2", "loop", "lora", "zero@2", "mixture", "full", "images", "eager",
	"lightning"}

// TestAsOnTheHost holds programs on the stage to their real runs on the CPU: after each forward pass, backward pass and
// step, storages of the same sizes are held, as many of each. PLIMSOLL_ALIKE=all has more programs.
func TestAsOnTheHost(t *testing.T) {
	whole(t)
	names := allAlike[:3]
	if os.Getenv("PLIMSOLL_ALIKE") == "all" {
		names = allAlike
	}
	const modules = "transformers.trainer,transformers.models.llama.modeling_llama,peft,torch.distributed.fsdp"
	r := request(t, append([]string{"live.py", "testdata/alike.py", modules}, names...)...)
	r.Patience = 8 * time.Minute
	really := exec.CommandContext(t.Context(), r.Command[0], r.Command[1:]...)
	really.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES=", "TMPDIR="+t.TempDir())
	var output, said bytes.Buffer
	really.Stdout, really.Stderr = &output, &said
	if err := really.Start(); err != nil {
		t.Fatal(err)
	}
	run(t, r)
	if err := really.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, said.Bytes())
	}
	host, gpu := readLive(t, output.Bytes()), readLive(t, r.Output.(*bytes.Buffer).Bytes())
	for _, name := range names {
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
