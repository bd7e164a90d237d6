package model

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/input/recipe/strict"
)

// transformers and the safetensors library wrote the checkpoint: see
// testdata/checkpoint.py. Its config.json and its headers agree.
func TestCheckpoint(t *testing.T) {
	config, err := Load("testdata/checkpoint")
	if err != nil {
		t.Fatal(err)
	}
	headers, err := Load("testdata/checkpoint/" + indexName)
	if err != nil {
		t.Fatal(err)
	}
	if config.Name != "checkpoint" || headers.Name != "checkpoint" {
		t.Errorf("the names are %q and %q", config.Name, headers.Name)
	}
	own := slices.DeleteFunc(config.Parameters, func(p Parameter) bool { return p.TiedTo != "" })
	slices.SortFunc(own, func(a, b Parameter) int { return compareNames(a.Name, b.Name) })
	if diff := cmp.Diff(own, headers.Parameters); diff != "" {
		t.Error(diff)
	}
}

// copyCheckpoint copies the checkpoint to a folder that a test may change.
func copyCheckpoint(t *testing.T) string {
	folder := t.TempDir()
	if err := os.CopyFS(folder, os.DirFS("testdata/checkpoint")); err != nil {
		t.Fatal(err)
	}
	return folder
}

func TestHeadersSpeakForUnknownArchitecture(t *testing.T) {
	folder := copyCheckpoint(t)
	write(t, filepath.Join(folder, configName), `{"architectures": ["Rwkv7ForCausalLM"]}`)
	m, err := Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	if m.Architecture != "Rwkv7ForCausalLM" || m.Elements() != 2392 {
		t.Errorf("got %s with %d", m.Architecture, m.Elements())
	}
	write(t, filepath.Join(folder, configName), `{"architectures": 1}`)
	_, err = Load(folder)
	checkFault(t, "broken config", err, "expected a list", "")
}

func TestIndexFaults(t *testing.T) {
	const first = "model-00001-of-00002.safetensors"
	edit := func(old, new string) func(*testing.T, string) {
		return func(t *testing.T, folder string) {
			path := filepath.Join(folder, indexName)
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			write(t, path, strings.Replace(string(text), old, new, 1))
		}
	}
	for name, test := range map[string]struct {
		change func(*testing.T, string)
		what   string
	}{
		"a file is missing": {func(t *testing.T, folder string) {
			if err := os.Remove(filepath.Join(folder, first)); err != nil {
				t.Fatal(err)
			}
		}, first + ": cannot be read: no such file"},
		"a tensor is missing": {edit(`model.norm.weight`, `model.norm.bias`),
			`"model.norm.bias" is not in model-00002`},
		"outside": {edit(first, "../"+first),
			"index.json:7:34: tensor \"model.embed_tokens.weight\": expected the name of a safetensors file"},
		"no map":     {edit("weight_map", "weights"), "weight_map is missing"},
		"not a name": {edit(`"`+first+`"`, "3"), "weight_map.model.embed_tokens.weight is 3, expected a string"},
	} {
		folder := copyCheckpoint(t)
		test.change(t, folder)
		_, err := Load(filepath.Join(folder, indexName))
		checkFault(t, name, err, test.what, "")
	}
	_, err := Load("testdata/checkpoint/" + first)
	checkFault(t, "one of several", err, "this file is one of several", indexName)
}

// safetensors returns a file with a header and zeros for data.
func safetensors(header string, data int) []byte {
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(file, header...), make([]byte, data)...)
}

func loadBytes(t *testing.T, file []byte) (*Model, error) {
	path := filepath.Join(t.TempDir(), singleName)
	write(t, path, string(file))
	return Load(path)
}

func TestHeader(t *testing.T) {
	m, err := loadBytes(t, safetensors(`{"__metadata__": {"format": "pt"},
		"h.10.attn.c_attn.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
		"h.9.attn.bias": {"dtype": "F32", "shape": [1, 1, 2, 2], "data_offsets": [12, 28]},
		"h.9.attn.masked_bias": {"dtype": "F32", "shape": [], "data_offsets": [28, 32]},
		"h.9.rotary_emb.inv_freq": {"dtype": "F32", "shape": [1], "data_offsets": [32, 36]},
		"h.9.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [36, 40]},
		"h.9.weight_scale_inv": {"dtype": "F32", "shape": [1], "data_offsets": [40, 44]},
		"position_ids": {"dtype": "I64", "shape": [1], "data_offsets": [44, 52]},
		"scale": {"dtype": "F16", "shape": [], "data_offsets": [52, 54]},
		"empty": {"dtype": "F16", "shape": [0, 7], "data_offsets": [54, 54]}}   `, 54))
	if err != nil {
		t.Fatal(err)
	}
	want := []Parameter{
		{"empty", []int64{0, 7}, dtype.F16, -1, "", false, false, false},
		{"h.9.weight", []int64{4}, dtype.F8E4M3, 9, "", false, false, false},
		{"h.10.attn.c_attn.weight", []int64{2, 3}, dtype.BF16, 10, "", false, false, false},
		{"scale", []int64{}, dtype.F16, -1, "", false, false, false},
	}
	if diff := cmp.Diff(want, m.Parameters); diff != "" {
		t.Error(diff)
	}
}

func TestHeaderFaults(t *testing.T) {
	const weight = `{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}`
	good := safetensors(weight, 8)
	length := func(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }
	edit := func(old, new string) []byte { return safetensors(strings.Replace(weight, old, new, 1), 8) }
	for name, test := range map[string]struct {
		file []byte
		what string
	}{
		"empty":            {nil, "not a safetensors file: it has 0 bytes"},
		"length only":      {good[:8], "the header has 61 bytes, but the file ends after 0 of them"},
		"truncated header": {good[:30], "ends after 22 of them"},
		"truncated data":   {good[:len(good)-1], "the tensors take 8 bytes, but the file has 7 after its header"},
		"more data":        {append(slices.Clone(good), 0), "the file has 9"},
		"2^63": {append(length(1<<63), good...),
			"the header would have 9223372036854775808 bytes, expected at most 100000000"},
		"above the limit": {append(length(maxHeader+1), good...), "expected at most 100000000"},
		"html":            {[]byte("<!DOCTYPE html><html></html>"), "not a safetensors file"},
		"no JSON":         {safetensors("PK", 0), "this is not JSON"},
		"no tensors":      {safetensors("{}", 0), "the files hold no parameters"},
		"array":           {safetensors("[]", 0), "the file holds a list of 0, expected an object"},
		"element type":    {edit("F32", "F4"), `1:17: tensor "w": unknown element type "F4"`},
		"type a number":   {edit(`"F32"`, "32"), "w.dtype is 32, expected a string"},
		"shape a number":  {edit("[2]", "2"), "w.shape is 2, expected a list"},
		"negative size":   {edit("[2]", "[-2]"), "w.shape[0] is -2, expected a whole number of at least 0"},
		"product":         {edit("[2]", "[9223372036854775807, 9223372036854775807]"), "elements"},
		"shape and data":  {edit("[2]", "[3]"), "the shape [3] of fp32 takes 12 bytes, but the data has 8"},
		"offsets":         {edit("[0, 8]", "[8, 0]"), "two ascending data_offsets"},
		"one offset":      {edit("[0, 8]", "[8]"), "two ascending data_offsets"},
		"no shape":        {edit("shape", "form"), "a dtype, a shape and"},
		"not an object":   {safetensors(`{"w": 3}`, 0), "w is 3, expected an object"},
		"gap": {edit("[0, 8]", "[4, 12]"),
			`tensor "w" starts at byte 4 of the data, but the tensor before it ends at 0`},
		"overlap": {edit("}}", `}, "v": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}`),
			`tensor "v" starts at byte 4 of the data, but the tensor before it ends at 8`},
		"twice": {edit("}}", `}, "w": 1}`), `"w" is listed twice`},
		"quantized": {edit(`"F32", "shape": [2]`, `"I32", "shape": [2]`),
			"quantized weights do not say what is trained"},
	} {
		_, err := loadBytes(t, test.file)
		checkFault(t, name, err, test.what, "")
	}
}

func FuzzHeader(f *testing.F) {
	f.Add([]byte(`{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`), int64(8))
	f.Add([]byte(`{"w":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}  `), int64(2))
	f.Add([]byte(`{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`), int64(0))
	f.Fuzz(func(t *testing.T, header []byte, data int64) {
		doc, err := strict.ParseJSON("m.safetensors", header)
		if err != nil {
			checkFault(t, "JSON", err, "", "")
			return
		}
		tensors, err := parseHeader(doc, data)
		if err != nil {
			checkFault(t, "header", err, "", "")
			return
		}
		var filled int64
		for _, tensor := range tensors {
			filled += Parameter{Shape: tensor.shape}.Elements() * tensor.dtype.Size()
		}
		if filled != data {
			t.Fatalf("the tensors take %d bytes of %d", filled, data)
		}
		m, err := fromTensors([]shard{{doc, tensors}}, "m", "m.safetensors")
		if err != nil {
			checkFault(t, "tensors", err, "", "")
			return
		}
		checkModel(t, m)
	})
}

func FuzzIndex(f *testing.F) {
	text, err := os.ReadFile("testdata/checkpoint/" + indexName)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"weight_map":{"a":"m.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":"../m.safetensors"}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		doc, err := strict.ParseJSON(indexName, text)
		if err != nil {
			checkFault(t, "JSON", err, "", "")
			return
		}
		files, names, err := parseIndex(doc)
		if err != nil {
			checkFault(t, "index", err, "", "")
			return
		}
		if len(files) != len(names) {
			t.Fatalf("%d files and %d lists of names", len(files), len(names))
		}
		for _, file := range files {
			if filepath.Base(file) != file || len(names[file]) == 0 {
				t.Fatalf("%q with %d tensors", file, len(names[file]))
			}
			for _, v := range names[file] {
				if v.Value.Text != file {
					t.Fatalf("%q is in %v", v.Name, v.Value)
				}
			}
		}
	})
}
