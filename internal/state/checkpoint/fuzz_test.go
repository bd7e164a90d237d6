//go:build linux

package checkpoint

import (
	"path/filepath"
	"testing"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// manifestOf returns the manifest of a small shard.
func manifestOf(f shardtest.Failer, format kernel.Format, pieces []shard.Piece) *manifest {
	s := Shard{World: 1, Part: "bf16", Format: format, Pieces: pieces}
	of, err := shard.NewLayout(format, 100, shard.Sections(pieces))
	if err != nil {
		f.Fatalf("%v", err)
	}
	l, err := newLayout(of, pieces)
	if err != nil {
		f.Fatalf("%v", err)
	}
	header, err := safetensorsHeader(ShardSchema, 3, l.tensors())
	if err != nil {
		f.Fatalf("%v", err)
	}
	return newManifest(s, l, 3, header, []byte(`{"epoch":1}`))
}

// FuzzManifest: an accepted manifest describes a file whose chunks can all be found.
func FuzzManifest(f *testing.F) {
	for _, format := range []kernel.Format{shardtest.SplitFormat,
		shardtest.Format(kernel.Adam, kernel.FP32, kernel.MomentsInt8, dtype.F16)} {
		for _, pieces := range [][]shard.Piece{shardtest.CutModel(shardtest.SmallModel,
			shardtest.Mixed(format.Moments))[0], nil} {
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
		chunks := []int{0, l.Chunks / 2, l.Chunks - 1}
		if l.Chunks == 0 { // of a replica that had nothing to save
			chunks = nil
		}
		for _, chunk := range chunks {
			c := l.Chunk(chunk)
			if c.Count < 1 || c.Intersect(l.Range()) != c.Range || l.ChunkAt(c.First) != c ||
				l.ChunkAt(c.End()-1) != c {
				t.Fatalf("chunk %d of %d is %+v of %d", chunk, l.Chunks, c, l.Elements)
			}
			for _, r := range l.regions(chunk) {
				stream := l.saved[r.stream]
				if r.bytes < 1 || r.offset < stream.offset || r.offset+r.bytes > stream.end() ||
					r.sum >= len(m.Streams[r.stream].Sums) {
					t.Fatalf("chunk %d is %+v of the stream %+v", chunk, r, stream)
				}
			}
		}
		if _, err := assemble("folder", []savedFile{&file{path: "file", manifest: m, layout: l}}, nil); err == nil {
			if _, err := safetensorsHeader(ShardSchema, m.Step, l.tensors()); err != nil {
				t.Log(err) // tensors may have the same name
			}
		}
	})
}

// FuzzSealed: an accepted document was sealed.
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
