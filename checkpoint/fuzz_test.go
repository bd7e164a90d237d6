package checkpoint

import (
	"archive/zip"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-json-experiment/json"

	"plimsoll/dtype"
	"plimsoll/fault"
	"plimsoll/optim/kernel"
)

// manifestOf is the manifest of a small shard.
func manifestOf(f failer, format kernel.Format, pieces []Piece) *manifest {
	s := Shard{World: 1, Part: "bf16", Format: format, Pieces: pieces}
	l, err := newLayout(format, 100, Sections(pieces), pieces)
	if err != nil {
		f.Fatalf("%v", err)
	}
	header, err := l.header(3)
	if err != nil {
		f.Fatalf("%v", err)
	}
	return newManifest(s, l, 3, header, []byte(`{"epoch":1}`))
}

// FuzzManifest: what is taken for a manifest describes a file of which every
// chunk can be found.
func FuzzManifest(f *testing.F) {
	for _, format := range []kernel.Format{splitFormat, format(kernel.Adam, kernel.FP32, kernel.MomentsInt8, dtype.F16)} {
		for _, pieces := range [][]Piece{cutModel(smallModel, mixed(format.Moments))[0], nil} {
			text, err := json.Marshal(manifestOf(f, format, pieces))
			if err != nil {
				f.Fatal(err)
			}
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m := &manifest{}
		if json.Unmarshal(text, m) != nil {
			return
		}
		l, err := m.layout()
		if err != nil {
			return
		}
		chunks := []int{0, l.chunks / 2, l.chunks - 1}
		if l.chunks == 0 { // of a replica that had nothing to save
			chunks = nil
		}
		for _, chunk := range chunks {
			first, count := l.extent(chunk)
			if count < 1 || first < 0 || first+count > l.elements || l.chunkAt(first) != chunk || l.chunkAt(first+count-1) != chunk {
				t.Fatalf("chunk %d of %d is %d elements from %d on of %d", chunk, l.chunks, count, first, l.elements)
			}
			for _, r := range l.regions(chunk) {
				stream := l.streams[r.stream]
				if r.bytes < 1 || r.offset < stream.offset || r.offset+r.bytes > stream.offset+stream.bytes || r.sum >= len(m.Streams[r.stream].Sums) {
					t.Fatalf("chunk %d is %+v of the stream %+v", chunk, r, stream)
				}
			}
		}
		if _, err := assemble("folder", []*file{{path: "file", manifest: m, layout: l}}, nil); err == nil {
			if _, err := l.header(m.Step); err != nil {
				t.Log(err) // tensors may have the same name
			}
		}
	})
}

// FuzzSealed: a document that is taken is one that was sealed.
func FuzzSealed(f *testing.F) {
	text, err := seal(&index{Schema: IndexSchema, Manifests: []stamp{stampOf("rank-00000-of-00001-bf16.json", nil)}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"crc32c":"00000000",`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var x index
		if unseal(text, &x) == nil && x.validate() == nil {
			for _, m := range x.Manifests {
				if filepath.Base(m.File) != m.File {
					t.Fatalf("the index names %q, which is not beside it", m.File)
				}
			}
		}
	})
}

// FuzzTorch: whatever pickle is in the archive, the answer is a checkpoint of
// which every element can be read, or an input error.
func FuzzTorch(f *testing.F) {
	for _, a := range []kernel.Algorithm{kernel.Adam, kernel.SGD} {
		c, err := assemble("folder", []*file{fileOf(f, format(a, kernel.FP32, kernel.MomentsFP32, dtype.F32))}, nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(newExporter(c, &bytes.Buffer{}, nil).pickle())
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "file.pt")
		writeArchive(t, path, text)
		c, err := OpenTorch(t.Context(), path, nil)
		var input *fault.Input
		if err != nil {
			if !errors.As(err, &input) {
				t.Fatalf("%v is no input error", err)
			}
			return
		}
		if err := c.Verify(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	})
}

func fileOf(f failer, format kernel.Format) *file {
	pieces := []Piece{{Name: "a", Shape: []int64{2, 3}, Count: 6}, {Name: "b", Shape: []int64{}, Group: 1, Count: 1}}
	m := manifestOf(f, format, pieces)
	l, err := m.layout()
	if err != nil {
		f.Fatalf("%v", err)
	}
	return &file{path: "file", manifest: m, layout: l}
}

// writeArchive writes a file as torch.save does, with that document and a few
// numbers.
func writeArchive(t *testing.T, path string, document []byte) {
	var archive bytes.Buffer
	z := zip.NewWriter(&archive)
	entry := func(name string, data []byte) {
		w, err := z.CreateHeader(&zip.FileHeader{Name: "archive/" + name, Method: zip.Store})
		if err == nil {
			_, err = w.Write(data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	entry("data.pkl", document)
	for _, key := range []string{"0", "1", "2", "3", "4", "5", "6", "7"} {
		entry("data/"+key, make([]byte, 24))
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, archive.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
