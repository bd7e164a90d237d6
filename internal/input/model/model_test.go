package model

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
)

var loads sync.Map // what loaded has loaded, by path

// loaded is Load, once for all tests, which do not change the model.
func loaded(path string) (*Model, error) {
	load, _ := loads.LoadOrStore(path, sync.OnceValues(func() (*Model, error) { return Load(path) }))
	return load.(func() (*Model, error))()
}

// parameters.golden holds the parameters from Hugging Face transformers, by
// name: see testdata/parameters.py. All names are those of published
// checkpoints, so tests compare the full list of every model. version5.golden
// has the names of the modules of transformers 5.
//
//	python3 testdata/parameters.py catalog/*.json testdata/variants/*.json > testdata/parameters.golden
//	python3 testdata/parameters.py --held catalog/*.json testdata/variants/*.json > testdata/version5.golden
func TestAgainstTransformers(t *testing.T) {
	paths := map[string]string{}
	for _, name := range ofTransformers() {
		paths[name] = name
	}
	variants, err := filepath.Glob("testdata/variants/*.json")
	if err != nil || len(variants) == 0 {
		t.Fatalf("no variants: %v", err)
	}
	for _, path := range variants {
		paths[strings.TrimSuffix(filepath.Base(path), ".json")] = path
	}
	models := map[string]*Model{}
	for name, path := range paths {
		if models[name], err = loaded(path); err != nil {
			t.Fatal(err)
		}
	}
	for _, golden := range []struct {
		file   string
		change func(*Model) *Model
	}{{"testdata/parameters.golden", func(m *Model) *Model { return m }},
		{"testdata/version5.golden", (*Model).FuseExperts}} {
		text, err := os.ReadFile(golden.file)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		for line := range strings.Lines(string(text)) {
			name, facts, _ := strings.Cut(strings.TrimSpace(line), " ")
			want[name] = facts
		}
		delete(want, "#")
		for name, m := range models {
			got := facts(golden.change(m))
			held := golden.file != "testdata/parameters.golden"
			// Names matter to operations only, and a model that reads images or sound has those of the modules.
			modules := len(m.Encoders) > 0 || m.Network != nil && len(m.Network.Towers) > 0
			if !modules && m.Network == nil && held && len(m.mixtures) == 0 || modules && !held {
				got, want[name] = count(got), count(want[name])
			}
			if got != want[name] {
				t.Errorf("%s, %s:\n got %s\nwant %s", golden.file, name, got, want[name])
			}
			delete(want, name)
		}
		if len(want) > 0 {
			t.Errorf("in %s and nowhere else: %v", golden.file, want)
		}
	}
}

// TestPublishedConfigs compares the parameters of more public configurations with
// those of transformers, and docs/models.md with their list:
//
//	python3 testdata/parameters.py testdata/published/*.json > testdata/published.golden
func TestPublishedConfigs(t *testing.T) {
	text, err := os.ReadFile("testdata/published.golden")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		name, want, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "#" {
			continue
		}
		names = append(names, name)
		m, err := Load(filepath.Join("testdata/published", name+".json"))
		if err != nil {
			t.Error(err)
		} else if got := facts(m); got != want {
			t.Errorf("%s:\n got %s\nwant %s", name, got, want)
		}
	}
	document, err := os.ReadFile("../../../docs/models.md")
	if err != nil {
		t.Fatal(err)
	}
	flat := strings.Join(strings.Fields(string(document)), " ")
	for list, of := range map[string][]string{"of the catalog": ofTransformers(), "others": names} {
		want := fmt.Sprintf("public configurations, %s (%d): %s ```", list, len(of), strings.Join(of, ", "))
		if !strings.Contains(flat, want) {
			t.Errorf("docs/models.md lacks\n%s", want)
		}
	}
}

// count returns the number of parameters of a line's facts.
func count(facts string) string {
	number, _, _ := strings.Cut(facts, " ")
	return number
}

// facts returns a line of parameters.golden without the name.
func facts(m *Model) string {
	lines := []string{}
	var shape []byte
	experts := false
	for _, p := range m.Parameters {
		shape = shape[:0]
		for i, side := range p.Shape {
			if i > 0 {
				shape = append(shape, 'x')
			}
			shape = strconv.AppendInt(shape, side, 10)
		}
		line := p.Name + " " + string(shape)
		if p.TiedTo != "" {
			line += " = " + p.TiedTo
		}
		lines = append(lines, line+"\n")
		experts = experts || strings.Contains(line, ".experts.")
	}
	if experts {
		slices.Sort(lines)
	}
	return fmt.Sprintf("%d %d %x", m.Elements(), len(m.Parameters), sha256.Sum256([]byte(strings.Join(lines, ""))))
}

// remoteCounts are the numbers of parameters that the pages of models of remote code say.
var remoteCounts = map[string]int64{"qwen-7b": 7_721_324_544, "baichuan2-7b": 7_505_973_248,
	"internlm2-7b": 7_737_708_544, "chatglm3-6b": 6_243_584_000, "mimo-7b": 7_833_409_536}

// ofTransformers returns the models of the catalog that are no remote code.
func ofTransformers() []string {
	return slices.DeleteFunc(Catalog(), func(name string) bool { return remoteCounts[name] > 0 })
}

func TestRemoteCounts(t *testing.T) {
	for name, want := range remoteCounts {
		path := name
		if _, ok := catalogConfig(name); !ok {
			path = filepath.Join("testdata/remote", name+".json")
		}
		if m, err := Load(path); err != nil {
			t.Error(err)
		} else if got := m.Elements(); got != want || (m.Network != nil) != (name == "qwen-7b") {
			t.Errorf("%s has %d parameters, want %d", name, got, want)
		}
	}
}

// Parameter counts from the authors and the model pages of the Hugging Face
// hub. They check the catalog's sizes against an independent source.
func TestPublishedCounts(t *testing.T) {
	for name, want := range map[string]int64{
		"qwen2.5-0.5b":   494_032_768,
		"qwen2.5-3b":     3_085_938_688,
		"qwen2.5-72b":    72_706_203_648,
		"qwen3-30b-a3b":  30_532_122_624,
		"llama-2-7b":     6_738_415_616,
		"llama-2-13b":    13_015_864_320,
		"llama-2-70b":    68_976_648_192,
		"llama-3-8b":     8_030_261_248,
		"llama-3-70b":    70_553_706_496,
		"llama-3.1-405b": 405_853_388_800,
		"llama-3.2-1b":   1_235_814_400,
		"llama-3.2-3b":   3_212_749_824,
		"mistral-7b":     7_241_732_096,
		"mixtral-8x7b":   46_702_792_704,
		"falcon-7b":      6_921_720_704,
		"gpt2":           124_439_808,
		"gpt2-xl":        1_557_611_200,
		"gpt-neox-20b":   20_554_567_680,
		"bloom-7b1":      7_069_016_064,
		"gemma-2-2b":     2_614_341_888,
		"gemma-2-9b":     9_241_705_984,
		"phi-3-mini":     3_821_079_552,
		"t5-11b":         11_307_321_344,
		"bert-large":     336_226_108,
		"ministral-8b":   8_019_808_256,

		"llama-3.2-11b-vision":      10_670_220_835,
		"llama-4-scout-17b-16e":     108_641_793_536,
		"llama-4-maverick-17b-128e": 401_583_781_376,
		"gemma-4-26b-a4b":           25_805_933_872,
		// Without the buffers: a scale of each layer, and two of the images' tokens.
		"gemma-4-31b": 31_273_088_876 - (60 + 2*1152),
		// Without keys and values of layers that take those of others, which the files hold, and without buffers.
		"gemma-4-e2b":  5_123_178_979 - (18_874_368 + 6_144 + 963),
		"gemma-3n-e2b": 5_439_438_272 - 10*(2*512*2048+256),
		"gemma-3n-e4b": 7_849_978_192 - 15*(2*512*2048+256),
		"gemma-4-12b":  11_959_730_176,
		// Without the pooling head and the table of packed positions, which transformers leaves out.
		"paddleocr-vl":        958_588_736 - 52_987_088,
		"lfm2-vl-450m":        450_822_656,
		"smolvlm2-2.2b":       2_246_784_880,
		"glm-4.6v-flash":      10_292_777_472,
		"falcon-h1-1.5b-deep": 1_554_872_208,
		"falcon-h1-7b":        7_585_648_736,
		"trinity-nano":        6_120_003_328,
		"jamba-1.5-large":     398_555_145_696,
		// Without the 26 x 256 biases that balance the experts.
		"kimi-linear-48b-a3b": 49_122_681_728 - 26*256,
		// Without the module that predicts further tokens.
		"qwen3.5-0.8b":      873_438_784 - 20_452_864,
		"qwen3.5-2b":        2_274_069_824 - 60_828_160,
		"qwen3.5-4b":        4_659_865_088 - 120_599_552,
		"qwen3.5-9b":        9_653_104_368 - 243_290_624,
		"qwen3.5-122b-a10b": 125_086_497_008 - 2_523_679_232,
		"qwen3.5-397b-a17b": 403_397_928_944 - 6_595_568_128,
		// Without the module that predicts further tokens, and without the 58 x
		// 256 biases that balance the experts, which no gradient trains.
		"deepseek-v3": 671_026_419_200 - 58*256,
	} {
		m, err := loaded(name)
		if err != nil {
			t.Error(err)
		} else if m.Elements() != want {
			t.Errorf("%s has %d parameters, want %d", name, m.Elements(), want)
		}
	}
}

// TestCatalogArchitecture: the architecture that is found without the model is the model's.
func TestCatalogArchitecture(t *testing.T) {
	for _, name := range []string{"gpt2", "llama-3.2-11b-vision", "mixtral-8x7b", "qwen3-4b", "bert-large"} {
		m, err := Load(name)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := CatalogArchitecture(name); err != nil || got != m.Architecture {
			t.Errorf("%s: %q, %v, want %q", name, got, err, m.Architecture)
		}
	}
	if got, err := CatalogArchitecture("qwen9"); err == nil {
		t.Errorf("qwen9 has the architecture %q", got)
	}
}

func TestLoadCatalog(t *testing.T) {
	m, err := Load("gpt2")
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "gpt2" || m.Architecture != "GPT2LMHeadModel" || m.Source != "catalog" {
		t.Errorf("got %s, %s, %s", m.Name, m.Architecture, m.Source)
	}
	got := []Parameter{m.Parameters[0], m.Parameters[4], m.Parameters[len(m.Parameters)-1]}
	want := []Parameter{
		{"transformer.wte.weight", []int64{50257, 768}, dtype.F32, -1, "", false, false, false},
		{"transformer.h.0.attn.c_attn.weight", []int64{768, 2304}, dtype.F32, 0, "", false, false, false},
		{"lm_head.weight", []int64{50257, 768}, dtype.F32, -1, "transformer.wte.weight", false, false, false},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestBlocks(t *testing.T) {
	for name, want := range map[string]int{"gpt2": 12, "qwen3-30b-a3b": 48, "t5-3b": 48, "bert-large": 24} {
		m, err := Load(name)
		if err != nil {
			t.Fatal(err)
		}
		elements := map[int]int64{}
		for _, p := range m.Parameters {
			elements[p.Block] += p.Elements()
		}
		for block := range want {
			if elements[block] == 0 {
				t.Errorf("%s: block %d has no parameters", name, block)
			}
		}
		if len(elements) != want+1 {
			t.Errorf("%s has %d blocks, want %d", name, len(elements)-1, want)
		}
	}
}

func TestBlockOf(t *testing.T) {
	for name, want := range map[string]int{
		"model.layers.17.mlp.experts.3.w1.weight": 17,
		"lm_head.weight":                     -1,
		"layers.07.weight":                   7,
		"layers.-1.weight":                   -1,
		"layers.99999999999999999999.weight": -1,
		"":                                   -1,
		"3":                                  3,
	} {
		if _, got := blockOf(name); got != want {
			t.Errorf("%q is of block %d, want %d", name, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		index := rapid.IntRange(0, maxParameters-1).Draw(t, "index")
		list := rapid.StringMatching(`[a-z_]+(\.[a-z_]+)?`).Draw(t, "list")
		gotList, got := blockOf(fmt.Sprintf("%s.%d.weight", list, index))
		if got != index || strings.TrimSuffix(gotList, ".") != list {
			t.Fatalf("got %q, %d", gotList, got)
		}
	})
}

func TestLoadFaults(t *testing.T) {
	empty := t.TempDir()
	foreign := t.TempDir()
	write(t, filepath.Join(foreign, configName), `{"architectures": ["Rwkv7ForCausalLM"]}`)
	for _, test := range []struct{ path, what, hint string }{
		{"qwen2.5-0.6b", `unknown model "qwen2.5-0.6b"`, "'plimsoll models qwen 2.5' lists"},
		{"qwen2.5-9b-base", `unknown model "qwen2.5-9b-base"`, "'plimsoll models qwen 2.5' lists"},
		{"llama-3-8", `unknown model "llama-3-8"`, `did you mean "llama-3-8b"?`},
		{"llama3", `unknown model "llama3"`, "the catalog has llama-3-70b, llama-3-8b"},
		{"claude", `unknown model "claude"`, "'plimsoll models' lists the catalog"},
		{filepath.Join(empty, configName), "there is no such file or folder", "give the path of a config.json"},
		{"", `unknown model ""`, "lists the catalog"},
		{empty, "the folder holds no config.json", "name the folder"},
		{foreign, `unknown architecture "Rwkv7ForCausalLM"`, "safetensors"},
		{"gpt2\x00", "cannot be read", ""},
	} {
		_, err := Load(test.path)
		checkFault(t, test.path, err, test.what, test.hint)
	}
}

// checkFault checks that err is bad input with this message and hint.
func checkFault(t *testing.T, name string, err error, what, hint string) {
	t.Helper()
	var input *fault.Input
	if !errors.As(err, &input) {
		t.Errorf("%s: got %v, want a fault.Input", name, err)
		return
	}
	if !strings.Contains(err.Error(), what) || !strings.Contains(input.Hint, hint) {
		t.Errorf("%s: got\n%s\nwant %q and the hint %q", name, err, what, hint)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestHeadsThatVersion5Ties: T5's head is tied since transformers 5, though config.json says that it is not, as
// flan-t5's does. 5.24.0 makes a model of 218,368 parameters, and one without the key has as many.
func TestHeadsThatVersion5Ties(t *testing.T) {
	text, err := os.ReadFile("testdata/variants/t5-gated.json")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "config.json")
	untied := strings.Replace(string(text), "{", `{"tie_word_embeddings": false,`, 1)
	if err := os.WriteFile(path, []byte(untied), 0o644); err != nil {
		t.Fatal(err)
	}
	m, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if before, since := m.Elements(), m.FuseExperts().Elements(); before != 282_368 || since != 218_368 {
		t.Errorf("%d parameters before transformers 5 and %d since", before, since)
	}
}
