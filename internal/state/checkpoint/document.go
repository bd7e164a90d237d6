package checkpoint

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"path/filepath"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/files"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// Schemas of the documents of a checkpoint.
const (
	ShardSchema = "plimsoll.shard/1"
	// ownStepsSchema is the schema of a shard whose parameters have had different numbers of steps: releases that know
	// of no such thing refuse it.
	ownStepsSchema = "plimsoll.shard/2"
	StatesSchema   = "plimsoll.states/1"
	IndexSchema    = "plimsoll.index/1"
)

// manifestHead begins every manifest.
type manifestHead struct {
	Schema   string `json:"schema"`
	Step     int64  `json:"step"`
	Identity string `json:"identity,omitzero"` // of the save
	Rank     int    `json:"rank"`
	World    int    `json:"world"`
	Part     string `json:"part"`
}

func (of owner) head(schema string) manifestHead {
	return manifestHead{schema, of.step, of.identity, of.rank, of.world, of.part}
}

// of returns the head, for both kinds of files.
func (h *manifestHead) of() *manifestHead { return h }

// manifest describes the file of a shard.
type manifest struct {
	manifestHead
	Algorithm string            `json:"algorithm"`
	State     string            `json:"state"`
	Moments   string            `json:"moments"`
	Parameter string            `json:"parameter"`
	Gradient  string            `json:"gradient"`
	Chunk     int64             `json:"chunk_elements"`
	Sections  []sectionDocument `json:"sections"`
	Pieces    []pieceDocument   `json:"pieces"`
	Bytes     int64             `json:"bytes"` // of the safetensors file
	Header    int64             `json:"header_bytes"`
	HeaderSum checksums         `json:"header_crc32c"`
	Streams   []streamDocument  `json:"streams"`
	Share     *shareDocument    `json:"share,omitzero"` // if several ranks hold the shard
	// OwnSteps are the steps that parameters have had, where they are not those of the state.
	OwnSteps map[string]int64 `json:"own_steps,omitempty"`
	Training jsontext.Value   `json:"training,omitzero"`
}

// shareDocument says which share of a shard the file holds. It shows that a checkpoint
// lacks the other shares.
type shareDocument struct {
	Replica  int       `json:"replica"`
	Replicas int       `json:"replicas"`
	Pieces   checksums `json:"pieces_crc32c"` // of the pieces of the full shard, the same in all its replicas
}

type sectionDocument struct {
	Elements int64  `json:"elements"`
	Group    int    `json:"group"`
	Moments  string `json:"moments"`
}

type pieceDocument struct {
	Name    string  `json:"name"`
	Shape   []int64 `json:"shape"`
	Group   int     `json:"group"`
	Moments string  `json:"moments"`
	First   int64   `json:"first"`
	Count   int64   `json:"count"`
}

type streamDocument struct {
	Name   string    `json:"name"`
	Type   string    `json:"type"`
	Offset int64     `json:"offset"` // in the file
	Bytes  int64     `json:"bytes"`
	Sums   checksums `json:"crc32c"` // of its chunks, in order
}

// checksums are CRC-32C (Castagnoli's), eight hexadecimal digits each.
type checksums []uint32

// MarshalText returns the checksums, one after the other.
func (c checksums) MarshalText() ([]byte, error) {
	text := make([]byte, 0, 8*len(c))
	for _, sum := range c {
		text = fmt.Appendf(text, "%08x", sum)
	}
	return text, nil
}

// UnmarshalText reads the text of MarshalText.
func (c *checksums) UnmarshalText(text []byte) error {
	if len(text)%8 != 0 {
		return fmt.Errorf("checksums of %d hexadecimal digits, expected 8 for each", len(text))
	}
	sums, err := hex.AppendDecode(nil, text)
	if err != nil {
		return err
	}
	*c = make(checksums, 0, len(sums)/4)
	for ; len(sums) > 0; sums = sums[4:] {
		*c = append(*c, uint32(sums[0])<<24|uint32(sums[1])<<16|uint32(sums[2])<<8|uint32(sums[3]))
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// A sealed document is JSON. Its first member is the checksum of all text behind it.
const (
	sealBegin = `{"crc32c":"`
	sealEnd   = `",`
	sealBytes = len(sealBegin) + 8 + len(sealEnd)
)

// seal returns a document with its checksum.
func seal(document any) ([]byte, error) {
	text, err := json.Marshal(document, jsontext.WithIndent(" "), jsontext.EscapeForHTML(false))
	if err != nil {
		return nil, err
	}
	text = append(text[1:], '\n') // without its brace
	return append(fmt.Appendf(nil, sealBegin+"%08x"+sealEnd, checksum(text)), text...), nil
}

// unseal reads a document and refuses one that has changed since it was sealed. It
// ignores members that a later version may have added.
func unseal(text []byte, into any) error {
	if len(text) < sealBytes || !bytes.HasPrefix(text, []byte(sealBegin)) ||
		string(text[sealBytes-len(sealEnd):sealBytes]) != sealEnd {
		return fmt.Errorf("it does not begin with %s, its checksum", sealBegin)
	}
	written, found := text[len(sealBegin):len(sealBegin)+8], fmt.Sprintf("%08x", checksum(text[sealBytes:]))
	if found != string(written) {
		return fmt.Errorf("its checksum is %s, expected %q: it was changed or cut short", found, written)
	}
	return json.Unmarshal(append([]byte{'{'}, text[sealBytes:]...), into)
}

// writeSealed writes a document: completely or not at all.
func writeSealed(path string, document any) error {
	text, err := seal(document)
	if err == nil {
		err = files.Replace(path, text)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// The largest documents that are written and read. A manifest has 8 bytes for each
// chunk of each stream: the limit is enough for 10^12 parameters on one rank. An index
// has about 100 bytes for each file.
const (
	maxManifest = 1 << 30
	maxIndex    = 1 << 28
)

// readSealed reads a document of at most limit bytes and returns its stamp.
func readSealed(path string, limit int64, into any) (stamp, error) {
	text, err := readBegun(path, sealBegin, limit)
	if err != nil {
		return stamp{}, err
	}
	if err := unseal(text, into); err != nil {
		return stamp{}, Broken(path, "damaged: %v", err)
	}
	return stampOf(path, text), nil
}

// readBegun reads a file if it begins as it should. A large file of another kind, or
// of nothing but zeros, takes no memory.
func readBegun(path, begin string, limit int64) ([]byte, error) {
	file, info, err := files.Open(path)
	if err != nil {
		return nil, Cause(path, "the checkpoint is not complete", errors.Unwrap(err))
	}
	defer file.Close()
	head := make([]byte, len(begin))
	if n, err := file.ReadAt(head, 0); err == nil && string(head) != begin || err == io.EOF && n < len(begin) {
		return nil, Broken(path, "damaged: it does not begin with %s", begin)
	}
	text, err := files.ReadOpen(file, info, limit)
	if err != nil {
		return nil, Cause(path, "the file cannot be read", errors.Unwrap(err))
	}
	return text, nil
}

// stamp identifies the content of a small file.
type stamp struct {
	File  string    `json:"file"` // beside the index
	Bytes int64     `json:"bytes"`
	Sum   checksums `json:"crc32c"`
}

func stampOf(path string, text []byte) stamp {
	return stamp{filepath.Base(path), int64(len(text)), checksums{checksum(text)}}
}

// newManifest returns the manifest of a shard, before anything is written.
func newManifest(s Shard, l *layout, step int64, header []byte, training jsontext.Value) *manifest {
	f := s.Format
	m := &manifest{
		manifestHead: s.owner(step).head(ShardSchema),
		Algorithm:    f.Algorithm.String(), State: f.State.String(), Moments: f.Moments.String(),
		Parameter: f.Parameter.String(), Gradient: f.Gradient.String(),
		Chunk: l.ChunkElements, Bytes: int64(len(header)) + l.data,
		Header: int64(len(header)), HeaderSum: checksums{checksum(header)},
		Training: training,
	}
	if own := ownStepsOf(s.ownSteps, l.pieces); len(own) > 0 {
		m.Schema, m.OwnSteps = ownStepsSchema, own
	}
	for _, s := range l.Sections() {
		m.Sections = append(m.Sections, sectionDocument{s.Elements, s.Group, s.Moments.String()})
	}
	m.Pieces = documentOf(l.pieces)
	if s.Replicas > 1 {
		m.Share = &shareDocument{s.Replica, s.Replicas, checksums{checksum(fmt.Append(nil, documentOf(s.Pieces)))}}
	}
	for _, s := range l.saved {
		m.Streams = append(m.Streams, streamDocument{
			string(s.Arena), s.Type.String(), int64(len(header)) + s.offset, s.Size(),
			make(checksums, s.Chunks),
		})
	}
	return m
}

func documentOf(pieces []shard.Piece) []pieceDocument {
	var documents []pieceDocument
	for _, p := range pieces {
		documents = append(documents, pieceDocument{p.Name, p.Shape, p.Group, p.Moments.String(), p.First, p.Count})
	}
	return documents
}

// layout returns the layout that the manifest describes, and checks the manifest
// against it.
func (m *manifest) layout() (*layout, error) {
	if m.Schema != ShardSchema && m.Schema != ownStepsSchema {
		return nil, fmt.Errorf("schema %q, expected %q or %q", m.Schema, ShardSchema, ownStepsSchema)
	}
	if err := validateName(m.Rank, m.World, m.Part); err != nil {
		return nil, err
	}
	if s := m.Share; s != nil &&
		(s.Replicas > maxRanks || s.Replica < 0 || s.Replica >= s.Replicas || len(s.Pieces) != 1) {
		return nil, fmt.Errorf("the share of replica %d of %d, with %d checksums for the ranges",
			s.Replica, s.Replicas, len(s.Pieces))
	}
	format, err := m.format()
	if err != nil {
		return nil, err
	}
	var sections []shard.Section
	for _, s := range m.Sections {
		moments, err := kernel.ParseMoments(s.Moments)
		if err != nil {
			return nil, fmt.Errorf("a section has moments %w", err)
		}
		sections = append(sections, shard.Section{Elements: s.Elements, Group: s.Group, Moments: moments})
	}
	var pieces []shard.Piece
	for _, p := range m.Pieces {
		moments, err := kernel.ParseMoments(p.Moments)
		if err != nil {
			return nil, fmt.Errorf("parameter %q has moments %w", p.Name, err)
		}
		pieces = append(pieces, shard.Piece{
			Name: p.Name, Shape: p.Shape, Group: p.Group, Range: shard.Range{First: p.First, Count: p.Count},
			Moments: moments,
		})
	}
	of, err := shard.NewLayout(format, m.Chunk, sections)
	if err != nil {
		return nil, err
	}
	l, err := newLayout(of, pieces)
	if err != nil {
		return nil, err
	}
	if err := m.checkOwnSteps(pieces); err != nil {
		return nil, err
	}
	return l, m.compare(l)
}

// checkOwnSteps refuses steps of parameters that the shard does not have, and more steps than the state has seen.
func (m *manifest) checkOwnSteps(pieces []shard.Piece) error {
	if len(m.OwnSteps) > 0 && m.Schema != ownStepsSchema {
		return fmt.Errorf("schema %q with own_steps, expected %q", m.Schema, ownStepsSchema)
	}
	for name, had := range m.OwnSteps {
		if had < 0 || had > m.Step {
			return fmt.Errorf("parameter %q has had %d steps, expected 0 to %d", name, had, m.Step)
		}
	}
	if known := ownStepsOf(m.OwnSteps, pieces); len(known) != len(m.OwnSteps) {
		return fmt.Errorf("own_steps of %d parameters, of which the shard has %d", len(m.OwnSteps), len(known))
	}
	return nil
}

// compare compares the manifest's sizes and streams with the layout.
func (m *manifest) compare(l *layout) error {
	if m.Step < 0 || m.Step > maxStep || m.Header < 8 || m.Header > maxHeader+8 ||
		len(m.HeaderSum) != 1 || m.Bytes != m.Header+l.data {
		return fmt.Errorf("step %d, a header of %d bytes with %d checksums and a file of %d bytes for streams of %d",
			m.Step, m.Header, len(m.HeaderSum), m.Bytes, l.data)
	}
	if len(m.Streams) != len(l.saved) {
		return fmt.Errorf("%d streams, expected %d", len(m.Streams), len(l.saved))
	}
	for i, want := range l.saved {
		got := m.Streams[i]
		if got.Name != string(want.Arena) || got.Type != want.Type.String() || got.Offset != m.Header+want.offset ||
			got.Bytes != want.Size() || len(got.Sums) != want.Chunks {
			return fmt.Errorf("stream %d is %q of %s, %d bytes at %d with %d checksums, "+
				"expected %q of %v, %d bytes at %d with %d",
				i, got.Name, got.Type, got.Bytes, got.Offset, len(got.Sums),
				want.Arena, want.Type, want.Size(), m.Header+want.offset, want.Chunks)
		}
	}
	return nil
}

// format returns the format of the saved state.
func (m *manifest) format() (f kernel.Format, err error) {
	if f.Algorithm, err = kernel.ParseAlgorithm(m.Algorithm); err != nil {
		return f, fmt.Errorf("algorithm %w", err)
	}
	if f.State, err = kernel.ParseState(m.State); err != nil {
		return f, fmt.Errorf("state %w", err)
	}
	if f.Moments, err = kernel.ParseMoments(m.Moments); err != nil {
		return f, fmt.Errorf("moments %w", err)
	}
	if f.Parameter, err = kernel.ParseNumberType(m.Parameter); err != nil {
		return f, fmt.Errorf("parameter %w", err)
	}
	if f.Gradient, err = kernel.ParseNumberType(m.Gradient); err != nil {
		return f, fmt.Errorf("gradient %w", err)
	}
	return f, nil
}

// index lists the files of a complete checkpoint.
type index struct {
	Schema    string  `json:"schema"`
	Step      int64   `json:"step"`
	Identity  string  `json:"identity,omitzero"` // of the save
	World     int     `json:"world"`
	Algorithm string  `json:"algorithm,omitzero"` // of shards; states have none
	Bytes     int64   `json:"bytes"`              // of all safetensors files
	Manifests []stamp `json:"manifests"`
	Without   []int   `json:"ranks_without_state,omitempty"`
}

// validate refuses an index that names other files than manifests beside it.
func (x *index) validate() error {
	switch {
	case x.Schema != IndexSchema:
		return fmt.Errorf("schema %q, expected %q", x.Schema, IndexSchema)
	case x.Step < 0 || x.Step > maxStep:
		return fmt.Errorf("step %d", x.Step)
	case len(x.Manifests) == 0:
		return errors.New("no manifest is named")
	}
	named := map[string]bool{}
	for _, m := range x.Manifests {
		if named[m.File] { // a short index could have one file read any number of times
			return fmt.Errorf("%q is named twice", m.File)
		}
		named[m.File] = true
		if !manifestName.MatchString(m.File) || m.Bytes < 0 || len(m.Sum) != 1 {
			return fmt.Errorf("%q of %d bytes with %d checksums is no manifest", m.File, m.Bytes, len(m.Sum))
		}
	}
	return nil
}
