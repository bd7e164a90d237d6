//go:build linux

package foreign

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// digestOf returns the SHA-256 of a stream of a parameter, in fp32.
func digestOf(t *testing.T, c *checkpoint.Checkpoint, name string, role kernel.Role) string {
	t.Helper()
	hash := sha256.New()
	own, _ := c.Piece(name)
	if err := c.Export(t.Context(), own, role, hash, nil); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(hash.Sum(nil))
}

var componentRoles = map[string]kernel.Role{
	"master": kernel.MasterRole, "exp_avg": kernel.FirstMomentRole, "exp_avg_sq": kernel.SecondMomentRole,
}

// linesIn returns the lines of a file.
func linesIn(t *testing.T, path string) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// TestMegatron reads checkpoints of megatron-core's own optimizer, of tensor parallel ranks. Every state is what
// torch.distributed.checkpoint reads there.
func TestMegatron(t *testing.T) {
	states := filepath.Join("testdata", "megatron")
	for name, path := range map[string]string{
		"fully_reshardable": filepath.Join("../../../..", "examples", "megatron"),
		"flattened":         filepath.Join(states, "flattened"),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := OpenMegatron(t.Context(), path, nil)
			if err != nil {
				t.Fatal(err)
			}
			ranks, err := c.Convert(t.Context(), t.TempDir(), checkpoint.Conversion{Ranks: 3}, nil)
			if err != nil {
				t.Fatal(err)
			}
			own, err := checkpoint.Open(ranks)
			if err != nil {
				t.Fatal(err)
			}
			lines := linesIn(t, filepath.Join(states, name+".txt"))
			if own.Step() != 3 || len(lines) != 3*len(own.Names()) {
				t.Fatalf("step %d, %d parameters and %d states", own.Step(), len(own.Names()), len(lines))
			}
			for _, line := range lines {
				component, rest, _ := strings.Cut(line, " ")
				parameter, rest, _ := strings.Cut(rest, " ")
				whole, ok := own.Piece(parameter)
				if !ok {
					t.Fatalf("there is no %q", parameter)
				}
				shape := strings.ReplaceAll(fmt.Sprint(whole.Shape), " ", ", ")
				if got := shape + " " + digestOf(t, own, parameter, componentRoles[component]); got != rest {
					t.Errorf("%s of %s is %s, want %s", component, parameter, got, rest)
				}
			}
		})
	}
}

// TestMegatronRefused: what cannot be read is named.
func TestMegatronRefused(t *testing.T) {
	folder := filepath.Join("../../../..", "examples", "megatron")
	replaced := func(name, from, to string) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			text, err := os.ReadFile(filepath.Join(path, name))
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(text), from) || len(from) != len(to) {
				t.Fatalf("%q is not in %s", from, name)
			}
			write(t, filepath.Join(path, name), strings.ReplaceAll(string(text), from, to))
		}
	}
	for name, test := range map[string]struct {
		change func(*testing.T, string)
		says   string
	}{
		"zarr":     {replaced("metadata.json", `"torch_dist"`, `"zarr"      `), `its format is "zarr"`},
		"no state": {replaced(".metadata", "optimizer.state.", "optimized.state."), "no state of an optimizer"},
		"buckets": {replaced(".metadata", "optimizer.state.exp_avg_sq.d", "optimizer.distributed.bucket"),
			"dp_reshardable"},
		"halves": {replaced(".metadata", "fc1.weight", "fc1.weig_w"), "one half of a projection"},
		"another optimizer": {replaced(".metadata", "optimizer.state.exp_avg_sq.", "optimizer.state.exp_max_sq."),
			"is no state of AdamW"},
		"a flipped bit": {func(t *testing.T, path string) {
			text, err := os.ReadFile(filepath.Join(path, "__0_0.distcp"))
			if err != nil {
				t.Fatal(err)
			}
			for i := 50; i < len(text); i += 97 {
				text[i] ^= 1
			}
			write(t, filepath.Join(path, "__0_0.distcp"), string(text))
		}, "iter_0000003"},
		"no step": {func(t *testing.T, path string) {
			if err := os.Remove(filepath.Join(path, "common.pt")); err != nil {
				t.Fatal(err)
			}
		}, "common.pt"},
	} {
		t.Run(name, func(t *testing.T) {
			changed := filepath.Join(t.TempDir(), "iter_0000003")
			if err := os.CopyFS(changed, os.DirFS(folder)); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(filepath.Dir(changed), "latest_checkpointed_iteration.txt"), "3\n")
			if _, err := OpenMegatron(t.Context(), filepath.Dir(changed), nil); err != nil {
				t.Fatal(err)
			}
			test.change(t, changed)
			_, err := OpenMegatron(t.Context(), filepath.Dir(changed), nil)
			shardtest.MustSay(t, err, test.says)
		})
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// torchaoFile returns the file of an optimizer of torchao.
func torchaoFile(optimizer string) string {
	if optimizer == "AdamW8bit" {
		return filepath.Join("../../../..", "examples", "torchao.pt")
	}
	return filepath.Join("testdata", "torchao", optimizer+".pt")
}

// TestQuantized reads states of torchao's optimizers. Every moment is what torchao dequantizes.
func TestQuantized(t *testing.T) {
	opened := map[string]*checkpoint.Checkpoint{}
	for _, line := range linesIn(t, filepath.Join("testdata", "torchao", "states.txt")) {
		fields := strings.SplitN(line, " ", 4)
		of, component, parameter := fields[0], fields[1], fields[2]
		if opened[of] == nil {
			c, err := OpenTorch(t.Context(), torchaoFile(of), BesideTorch{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.Step() != 3 || len(c.Names()) != 4 || !strings.HasPrefix(c.Quantized(), "torchao.optim.subclass_") {
				t.Errorf("%s: step %d, %v, moments of %q", of, c.Step(), c.Names(), c.Quantized())
			}
			opened[of] = c
		}
		if !strings.HasSuffix(fields[3], digestOf(t, opened[of], parameter, componentRoles[component])) {
			t.Errorf("%s: %s of %s is not %s", of, component, parameter, fields[3])
		}
	}
	if len(opened) != 3 {
		t.Errorf("%d files", len(opened))
	}
}

// TestGrid cuts tensors at random, and reads them in ranges.
func TestGrid(t *testing.T) {
	shape := []int64{6, 4, 10}
	data := make([]byte, 4*6*4*10)
	for i := range data {
		data[i] = byte(i * 7 / 4)
	}
	path := filepath.Join(t.TempDir(), "numbers")
	var file []byte
	var blocks []*block
	for _, rows := range [][2]int64{{0, 1}, {1, 3}, {4, 2}} {
		for _, columns := range [][2]int64{{0, 7}, {7, 3}} {
			b := &block{offsets: []int64{rows[0], 0, columns[0]}, sizes: []int64{rows[1], 4, columns[1]}}
			b.starts, b.places = []int64{0}, []checkpoint.Location{{Path: path, Offset: int64(len(file))}}
			count := int64(0)
			for i := rows[0]; i < rows[0]+rows[1]; i++ {
				for j := range int64(4) {
					first := 4 * (i*40 + j*10 + columns[0])
					row := data[first : first+4*columns[1]]
					if count++; count == 3 { // a second part, elsewhere
						file = append(append(file, row[:4]...), make([]byte, 12)...)
						row = row[4:]
						b.starts = append(b.starts, 2*columns[1]+1)
						b.places = append(b.places, checkpoint.Location{Path: path, Offset: int64(len(file))})
					}
					file = append(file, row...)
				}
			}
			blocks = append(blocks, b)
		}
	}
	write(t, path, string(file))
	g, err := newGrid(shape, slices.Clone(blocks))
	if err != nil {
		t.Fatal(err)
	}
	files := checkpoint.OpenFiles{}
	for first := int64(0); first < 240; first += 13 {
		for _, count := range []int64{1, 9, 40, 240 - first} {
			count = min(count, 240-first)
			got := make([]byte, 4*count)
			if err := (section{g, first}).Read(files.Open, 0, got); err != nil {
				t.Fatal(err)
			}
			if string(got) != string(data[4*first:4*(first+count)]) {
				t.Fatalf("%d numbers from %d on differ", count, first)
			}
		}
	}
	if err := files.Close(); err != nil {
		t.Fatal(err)
	}
	for name, wrong := range map[string][]*block{
		"a gap":      blocks[1:],
		"twice":      append(slices.Clone(blocks), blocks[0]),
		"none":       nil,
		"outside":    append(slices.Clone(blocks), &block{offsets: []int64{6, 0, 0}, sizes: []int64{1, 4, 10}}),
		"two shapes": append(slices.Clone(blocks), &block{offsets: []int64{0, 0, 0}, sizes: []int64{2, 4, 10}}),
		"other rank": {{offsets: []int64{0}, sizes: []int64{6}}},
	} {
		if _, err := newGrid(shape, slices.Clone(wrong)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestManyFiles: a reader closes files before it has too many open.
func TestManyFiles(t *testing.T) {
	files, folder := checkpoint.OpenFiles{}, t.TempDir()
	for i := range 3 * checkpoint.MaxOpen {
		path := filepath.Join(folder, fmt.Sprint(i))
		write(t, path, "number!!")
		b := make([]byte, 4)
		if err := (checkpoint.Location{Path: path, Offset: 0}).Read(files.Open, 1, b); err != nil ||
			string(b) != "er!!" {
			t.Fatal(string(b), err)
		}
		if len(files) > checkpoint.MaxOpen {
			t.Fatalf("%d files are open", len(files))
		}
	}
	if err := files.Close(); err != nil || len(files) != 0 {
		t.Fatal(err)
	}
}

// TestChunks: chunks of rows are all of a parameter.
func TestChunks(t *testing.T) {
	for _, test := range []struct {
		shape []int64
		limit int64
		count int
	}{{nil, 1, 1}, {[]int64{10}, 3, 4}, {[]int64{10, 7}, 20, 5}, {[]int64{1, 90}, 3, 1}, {[]int64{4, 2, 3}, 100, 1}} {
		p := shard.Piece{Name: "p", Shape: test.shape}
		p.Count, _ = p.Elements()
		chunks, sum := chunksOf(p, test.limit), int64(0)
		for _, c := range chunks {
			rows, err := rowsOf(c, test.shape)
			if err != nil || rows.First != sum {
				t.Errorf("%v: %v, %v", test, rows, err)
			}
			sum += rows.Count
		}
		if sum != p.Count || len(chunks) != test.count {
			t.Errorf("%v: %d elements in %d chunks", test, sum, len(chunks))
		}
	}
}
