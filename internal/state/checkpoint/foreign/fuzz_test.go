//go:build linux

package foreign

import (
	"archive/zip"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/pickle"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// pickles are documents as WriteTorch writes them.
func pickles(f *testing.F) [][]byte {
	var documents [][]byte
	for _, a := range []kernel.Algorithm{kernel.Adam, kernel.SGD} {
		c, err := twoParameters(a)
		if err != nil {
			f.Fatal(err)
		}
		documents = append(documents, newExporter(c, &bytes.Buffer{}, nil).pickle())
	}
	return documents
}

// FuzzUnpickle: every pickle is read to its end or refused. Its document is understood or
// refused.
func FuzzUnpickle(f *testing.F) {
	for _, document := range pickles(f) {
		f.Add(document)
	}
	f.Add([]byte("\x80\x02]q\x00(h\x00K\x01\x8a\x01\xffG\x00\x00\x00\x00\x00\x00\x00\x00\x85e."))
	f.Fuzz(func(t *testing.T, text []byte) {
		document, err := pickle.Read(text, nil)
		if err != nil {
			return
		}
		file := &torchFile{archive: &archive{path: "file.pt", data: bytes.NewReader(nil)}}
		if err := file.understand(document); err == nil && len(file.Pieces) > 0 {
			t.Fatalf("a file without numbers has the parameters %v", file.Pieces)
		}
	})
}

// FuzzTorch: every pickle in an archive gives a checkpoint whose elements can all be read,
// or an input error.
func FuzzTorch(f *testing.F) {
	for _, document := range pickles(f) {
		f.Add(document)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "file.pt")
		if err := os.WriteFile(path, archiveOf(t, text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := OpenTorch(t.Context(), path, BesideTorch{}, nil)
		readOrRefuse(t, c, err)
	})
}

// twoParameters returns a checkpoint of zeros.
func twoParameters(a kernel.Algorithm) (*checkpoint.Checkpoint, error) {
	var rank checkpoint.ForeignShard
	for group, p := range []shard.Piece{{Name: "a", Shape: []int64{2, 3}}, {Name: "b", Shape: []int64{}, Group: 1}} {
		own, err := pieceOf(p.Name, group, p.Shape)
		if err == nil {
			err = rank.Add(own, a, 3, slices.Repeat([]checkpoint.Numbers{checkpoint.Zeros{}}, 1+a.Moments()))
		}
		if err != nil {
			return nil, err
		}
	}
	return checkpoint.AssembleForeign("folder", torchPart, []*checkpoint.ForeignShard{&rank})
}

// archiveOf returns a file as torch.save writes it, with a document and a few numbers.
func archiveOf(t *testing.T, document []byte) []byte {
	entries := []zipEntry{{"archive/data.pkl", zip.Store, document}}
	for _, key := range []string{"0", "1", "2", "3", "4", "5", "6", "7"} {
		entries = append(entries, zipEntry{"archive/data/" + key, zip.Store, make([]byte, 4096)})
	}
	return zipOf(t, entries...)
}

// zipEntry is an entry of an archive.
type zipEntry struct {
	name    string
	method  uint16
	content []byte
}

// zipOf returns an archive.
func zipOf(t *testing.T, entries ...zipEntry) []byte {
	t.Helper()
	var archive bytes.Buffer
	z := zip.NewWriter(&archive)
	for _, e := range entries {
		w, err := z.CreateHeader(&zip.FileHeader{Name: e.name, Method: e.method})
		if err == nil {
			_, err = w.Write(e.content)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return archive.Bytes()
}

// FuzzDistributed: metadata of torch.distributed.checkpoint is understood or refused. An
// understood checkpoint can be read.
func FuzzDistributed(f *testing.F) {
	folder := filepath.Join("../../../..", "examples", "fsdp")
	metadata, err := os.ReadFile(filepath.Join(folder, metadataName))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(metadata)
	names, err := filepath.Glob(filepath.Join(folder, "*.distcp"))
	if err != nil || len(names) != 2 {
		f.Fatal(names, err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		own := t.TempDir()
		for _, name := range names {
			path, err := filepath.Abs(name)
			if err == nil {
				err = os.Symlink(path, filepath.Join(own, filepath.Base(name)))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(own, metadataName), text, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := OpenDistributed(t.Context(), own, nil)
		readOrRefuse(t, c, err)
	})
}

// FuzzMegatron: metadata of Megatron's dist_checkpointing are understood or refused. An
// understood checkpoint can be read.
func FuzzMegatron(f *testing.F) {
	c, err := OpenDistributed(f.Context(), filepath.Join("../../../..", "examples", "fsdp"), nil)
	if err != nil {
		f.Fatal(err)
	}
	folder := f.TempDir()
	d := &distcpWriter{exporter: newExporter(c, io.Discard, nil), limit: 100}
	var file bytes.Buffer
	d.file = &counter{w: &file}
	for _, p := range d.parameters[:2] { // one of all layers, and one of its own
		for i, component := range []string{"param", "exp_avg", "exp_avg_sq"} {
			path := []any{"optimizer", "state", component, "layers" + p.Name}
			if len(p.Shape) > 1 {
				path[3] = "layers.w" + p.Name
			}
			if err := d.tensor(f.Context(), path, p, d.roles[i]); err != nil {
				f.Fatal(err)
			}
		}
	}
	common := dictOf(func(p *pickle.Writer) {
		p.Text("optimizer")
		p.Dict(func() {
			p.Text("param_groups")
			p.List(func() { p.Dict(func() { p.Text("step"); p.Int(3) }) })
		})
	})
	if err := saveTorch(filepath.Join(folder, "common.pt"), common, nil); err != nil {
		f.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"metadata.json": []byte(`{"sharded_backend": "torch_dist"}`), distcpFile: file.Bytes(), metadataName: d.metadata(),
	} {
		if err := os.WriteFile(filepath.Join(folder, name), text, 0o600); err != nil {
			f.Fatal(err)
		}
	}
	if _, err := OpenMegatron(f.Context(), folder, nil); err != nil {
		f.Fatal(err)
	}
	f.Add(d.metadata())
	f.Fuzz(func(t *testing.T, text []byte) {
		own := t.TempDir()
		for _, name := range []string{"metadata.json", "common.pt", distcpFile} {
			if err := os.Symlink(filepath.Join(folder, name), filepath.Join(own, name)); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(own, metadataName), text, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := OpenMegatron(t.Context(), own, nil)
		readOrRefuse(t, c, err)
	})
}

// FuzzQuantized: documents with states of torchao are understood or refused. An understood
// checkpoint can be read.
func FuzzQuantized(f *testing.F) {
	var data []*zip.File
	for _, name := range []string{"AdamW8bit", "AdamWFp8", "AdamW4bit"} {
		archive, err := zip.OpenReader(torchaoFile(name))
		if err != nil {
			f.Fatal(err)
		}
		defer archive.Close()
		for _, entry := range archive.File {
			if filepath.Base(entry.Name) == "data.pkl" {
				f.Add(contentOf(f, entry))
			}
		}
		data = archive.File
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "file.pt")
		var entries []zipEntry
		for _, entry := range data {
			content := text
			if filepath.Base(entry.Name) != "data.pkl" {
				content = contentOf(t, entry)
			}
			entries = append(entries, zipEntry{entry.Name, zip.Store, content})
		}
		if err := os.WriteFile(path, zipOf(t, entries...), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := OpenTorch(t.Context(), path, BesideTorch{}, nil)
		readOrRefuse(t, c, err)
	})
}

// contentOf reads an entry of an archive.
func contentOf(f shardtest.Failer, entry *zip.File) []byte {
	r, err := entry.Open()
	if err != nil {
		f.Fatalf("%v", err)
	}
	defer r.Close()
	content, err := io.ReadAll(r)
	if err != nil {
		f.Fatalf("%v", err)
	}
	return content
}

// FuzzDeepSpeed: what a rank of ZeRO has saved is understood or refused. An understood
// checkpoint can be read.
func FuzzDeepSpeed(f *testing.F) {
	const rank1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
	folder := filepath.Join("../../../..", "examples", "deepspeed", "global_step3")
	archive, err := zip.OpenReader(filepath.Join(folder, rank1))
	if err != nil {
		f.Fatal(err)
	}
	defer archive.Close()
	for _, entry := range archive.File {
		if filepath.Base(entry.Name) != "data.pkl" {
			continue
		}
		f.Add(contentOf(f, entry))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		own := t.TempDir()
		if err := os.CopyFS(own, os.DirFS(folder)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(own, rank1), archiveOf(t, text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := OpenDeepSpeed(t.Context(), own, nil)
		readOrRefuse(t, c, err)
	})
}

// FuzzZeroLike: a state goes into the place of what a rank of ZeRO has saved, or that is refused.
func FuzzZeroLike(f *testing.F) {
	const rank1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
	folder := filepath.Join("../../../..", "examples", "deepspeed", "global_step3")
	z := &zero{path: folder}
	if _, err := z.open(f.Context()); err != nil {
		f.Fatal(err)
	}
	archive, err := zip.OpenReader(filepath.Join(folder, rank1))
	if err != nil {
		f.Fatal(err)
	}
	defer archive.Close()
	var rest []zipEntry
	var whole []byte
	for _, entry := range archive.File {
		if filepath.Base(entry.Name) == "data.pkl" {
			whole = contentOf(f, entry)
			f.Add(whole, int64(3))
			f.Add(whole, int64(70_000))
		} else {
			rest = append(rest, zipEntry{entry.Name, zip.Store, contentOf(f, entry)})
		}
	}
	prefix, _, _ := strings.Cut(archive.File[0].Name, "/")
	f.Fuzz(func(t *testing.T, text []byte, step int64) {
		for _, rank := range z.ranks {
			rank.Step = step & (1<<24 - 1) // all fp32 numbers
		}
		own, err := checkpoint.AssembleForeign(folder, zeroPart, z.ranks)
		if err != nil {
			t.Fatal(err)
		}
		like := filepath.Join(t.TempDir(), "like")
		if err := os.CopyFS(like, os.DirFS(folder)); err != nil {
			t.Fatal(err)
		}
		entries := append([]zipEntry{{prefix + "/data.pkl", zip.Store, text}}, rest...)
		if err := os.WriteFile(filepath.Join(like, rank1), zipOf(t, entries...), 0o600); err != nil {
			t.Fatal(err)
		}
		out := t.TempDir()
		if err := WriteDeepSpeed(t.Context(), own, out, like, nil); err != nil {
			if bytes.Equal(text, whole) {
				t.Error(err)
			}
			readOrRefuse(t, nil, err)
			return
		}
		got, err := OpenDeepSpeed(t.Context(), out, nil)
		if err != nil || got.Step() != own.Step() {
			t.Fatal(err)
		}
		for _, name := range own.Names() {
			for _, role := range componentRoles {
				if a, b := digestOf(t, got, name, role), digestOf(t, own, name, role); a != b {
					t.Errorf("role %v of %s is not the state's", role, name)
				}
			}
		}
	})
}

// readOrRefuse expects a checkpoint that can be read, or an input error.
func readOrRefuse(t *testing.T, c *checkpoint.Checkpoint, err error) {
	t.Helper()
	var input *fault.Input
	switch {
	case err == nil:
		if err := newExporter(c, io.Discard, nil).write(t.Context()); err != nil { // reads all numbers
			t.Fatal(err)
		}
	case !errors.As(err, &input):
		t.Fatalf("%v is no input error", err)
	}
}

// FuzzTorchLike: the state_dict of an optimizer is refused, or what is written in its place is read again, with its
// groups.
func FuzzTorchLike(f *testing.F) {
	c, err := twoParameters(kernel.Adam)
	if err != nil {
		f.Fatal(err)
	}
	for _, document := range pickles(f) {
		f.Add(document)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		document, err := pickle.Read(text, quantizedClass)
		if err != nil {
			return
		}
		like, err := likeOf(c, "optimizer.pt", document, nil)
		if err != nil {
			return
		}
		e := newExporter(c, io.Discard, nil)
		e.like, e.parameters = like, like.parameters
		written, err := pickle.Read(e.pickle(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := pickle.Items(pickle.Member(written, "param_groups")); len(got) != len(like.groups) {
			t.Fatalf("%d groups, want %d", len(got), len(like.groups))
		}
	})
}
