package evidence

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/ulikunitz/xz"

	"plimsoll/internal/base/fault"
)

// refusedOnGPU is a line with a failure.
const refusedOnGPU = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total " +
	"capacity of 79.15 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.94 GiB " +
	"memory in use. Of the allocated memory 75.20 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch " +
	"but unallocated.\n"

// file is a file of an archive.
type file struct{ name, text string }

func tarOf(tb testing.TB, files ...file) []byte {
	tb.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		header := &tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.text)), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(header); err != nil {
			tb.Fatal(err)
		}
		if _, err := io.WriteString(w, f.text); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

func zipOf(tb testing.TB, files ...file) []byte {
	tb.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, f := range files {
		member, err := w.Create(f.name)
		if err != nil {
			tb.Fatal(err)
		}
		if _, err := io.WriteString(member, f.text); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

// membersOf reads an archive of either format.
func membersOf(archive []byte) (sources []*Source, cut bool, err error) {
	text, err := Open("bundle", bytes.NewReader(archive))
	if err != nil {
		return nil, false, err
	}
	each := func(member *Text) error {
		s, err := member.Source()
		if err == nil {
			sources = append(sources, s)
		}
		return err
	}
	switch text.Archive {
	case Tar:
		cut, err = text.TarMembers(each)
	case Zip:
		err = ZipMembers("bundle", bytes.NewReader(archive), int64(len(archive)), each)
	default:
		err = errors.New("this is no archive")
	}
	return sources, cut, err
}

// TestArchives: the files of an archive are read as if they were in a folder, also compressed ones.
func TestArchives(t *testing.T) {
	zipped := compressed(func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil })
	log := file{"run/logs/train.log", "step 1\n" + refusedOnGPU}
	files := []file{log, {"run/rank1.log.gz", string(zipped([]byte(refusedOnGPU)))}, {"run/empty.log", ""},
		{"run/image.png", "\x89PNG\r\n\x1a\n"}}
	for name, archive := range map[string][]byte{
		"tar": tarOf(t, files...), "zip": zipOf(t, files...), "tar.gz": zipped(tarOf(t, files...)),
		"tar.xz": wholes["xz"](tarOf(t, files...)), "tar.zst": wholes["zstd"](tarOf(t, files...)),
	} {
		t.Run(name, func(t *testing.T) {
			sources, cut, err := membersOf(archive)
			if err != nil || cut || len(sources) != 3 {
				t.Fatalf("%d sources, cut %v, %v: expected 3", len(sources), cut, err)
			}
			if f := sources[0].Findings; len(f) != 1 || f[0].File != "bundle/run/logs/train.log" || f[0].Number != 2 {
				t.Errorf("%+v: expected one finding in line 2 of the log", f)
			}
			if f := sources[1].Findings; len(f) != 1 || f[0].Number != 1 {
				t.Errorf("%+v: expected one finding in the compressed log", f)
			}
			if sources[2].Kind != Binary {
				t.Errorf("an image is a %q", sources[2].Kind)
			}
		})
	}
}

// TestArchiveInArchive: it is named and not opened.
func TestArchiveInArchive(t *testing.T) {
	inner := tarOf(t, file{"train.log", refusedOnGPU})
	for name, archive := range map[string][]byte{
		"tar": inner, "zip": zipOf(t, file{"train.log", refusedOnGPU}), "tar.xz": wholes["xz"](inner),
	} {
		sources, _, err := membersOf(tarOf(t, file{"inner", string(archive)}))
		if err != nil || len(sources) != 1 || sources[0].Kind != ArchiveFile || len(sources[0].Findings) != 0 {
			t.Errorf("%s: %+v, %v: expected an archive without findings", name, sources, err)
		}
	}
}

// TestNamesInArchives: a name is shown as a path below the archive, without anything that acts on a terminal.
func TestNamesInArchives(t *testing.T) {
	for name, shown := range map[string]string{
		"../../../etc/passwd":    "bundle/etc/passwd",
		"/etc/passwd":            "bundle/etc/passwd",
		"a\x1b[31m.log":          `bundle/a\u001b[31m.log`,
		"a/./b//c":               "bundle/a/b/c",
		strings.Repeat("x", 900): "bundle/..." + strings.Repeat("x", longestMemberName),
	} {
		for format, archive := range map[string][]byte{
			"tar": tarOf(t, file{name, refusedOnGPU}), "zip": zipOf(t, file{name, refusedOnGPU}),
		} {
			sources, _, err := membersOf(archive)
			if err != nil || len(sources) != 1 || sources[0].Name != shown || len(sources[0].Findings) != 1 {
				t.Errorf("%s, %q: %+v, %v: expected %q", format, name, sources, err, shown)
			}
		}
	}
}

// TestSpecialFilesInArchives: links, devices and pipes have no text.
func TestSpecialFilesInArchives(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i, kind := range []byte{tar.TypeSymlink, tar.TypeLink, tar.TypeChar, tar.TypeFifo, tar.TypeDir} {
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprint(i), Linkname: "/etc/passwd", Typeflag: kind}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if sources, cut, err := membersOf(b.Bytes()); len(sources) != 0 || cut || err != nil {
		t.Errorf("%v, cut %v, %v: expected nothing", sources, cut, err)
	}
}

// TestDamagedArchives: what comes before the damage counts, and the damage is known.
func TestDamagedArchives(t *testing.T) {
	files := []file{{"one.log", refusedOnGPU}, {"two.log", strings.Repeat(refusedOnGPU, 10)}}
	whole := tarOf(t, files...)
	sources, cut, err := membersOf(whole[:3000])
	if err != nil || !cut || len(sources) != 2 || sources[0].Cut || !sources[1].Cut {
		t.Errorf("a cut tar: %+v, cut %v, %v", sources, cut, err)
	}
	damaged := zipOf(t, files...)
	at := bytes.Index(damaged, []byte("PK\x01\x02")) - 40 // in the second file
	damaged[at] ^= 0x55
	sources, _, err = membersOf(damaged)
	if err != nil || len(sources) != 2 || sources[0].Cut || !sources[1].Cut {
		t.Errorf("a damaged zip: %+v, %v", sources, err)
	}
	var input *fault.Input
	if _, _, err = membersOf(damaged[:100]); !errors.As(err, &input) || input.Hint == "" {
		t.Errorf("a zip without its list: %v", err)
	}
}

// TestLimitsOfArchives: an archive that would take long or much memory is refused, with what to do about it.
func TestLimitsOfArchives(t *testing.T) {
	many := make([]file, mostMembers+1)
	for i := range many {
		many[i] = file{fmt.Sprint(i), "a"}
	}
	listed := zipOf(t, file{"a", "a"})
	locked := bytes.Clone(listed)
	entry := bytes.Index(locked, []byte("PK\x01\x02"))
	locked[entry+8] |= 1
	unknown := bytes.Clone(listed)
	binary.LittleEndian.PutUint16(unknown[entry+10:], 77)
	for name, test := range map[string]struct {
		archive []byte
		says    string
	}{
		"members of a tar":  {tarOf(t, many...), "10000 files"},
		"members of a zip":  {zipOf(t, many...), "10000 files"},
		"encrypted":         {locked, "encrypted"},
		"unknown":           {unknown, "unsupported compression"},
		"a long list":       {longList(t), "list of its files is too long"},
		"a window of xz":    {hugeWindow(t), "window of more than 128 MiB"},
		"a window in a tar": {tarOf(t, file{"a.xz", string(hugeWindow(t))}), "window of more than 128 MiB"},
	} {
		_, _, err := membersOf(test.archive)
		var input *fault.Input
		if !errors.As(err, &input) || input.Hint == "" || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, expected %q and a hint", name, err, test.says)
		}
	}
}

// longList returns a zip whose list of files has more bytes than are read of one.
func longList(tb testing.TB) []byte {
	listed := zipOf(tb, file{strings.Repeat("n", 60_000), "a"})
	first, last := bytes.Index(listed, []byte("PK\x01\x02")), bytes.LastIndex(listed, []byte("PK\x05\x06"))
	list := bytes.Repeat(listed[first:last], largestDirectory/60_000+10)
	end := bytes.Clone(listed[last:])
	binary.LittleEndian.PutUint32(end[12:], uint32(len(list)))
	return slices.Concat(listed[:first], list, end)
}

// hugeWindow returns an .xz whose text may refer 768 MiB back.
func hugeWindow(tb testing.TB) []byte {
	var b bytes.Buffer
	w, err := xz.WriterConfig{DictCap: 1 << 16}.NewWriter(&b)
	if err != nil {
		tb.Fatal(err)
	}
	if _, err = io.WriteString(w, refusedOnGPU); err == nil {
		err = w.Close()
	}
	if err != nil {
		tb.Fatal(err)
	}
	// The header of the first block: its size, flags, the filter LZMA2, the size of its properties, and the window.
	const block, window, code = 12, 4, 35 // 768 MiB in the code of the format
	header := b.Bytes()[block:]
	size := (int(header[0]) + 1) * 4
	header[window] = code
	binary.LittleEndian.PutUint32(header[size-4:], crc32.ChecksumIEEE(header[:size-4]))
	return b.Bytes()
}

// TestBombsInArchives: all texts of an archive share one limit.
func TestBombsInArchives(t *testing.T) {
	m := newMembers("bundle", func(text *Text) error {
		_, err := io.Copy(io.Discard, text.Reader)
		return err
	})
	m.limit.left = 3000
	if err := m.open("a", strings.NewReader(strings.Repeat("a", 2000))); err != nil {
		t.Fatal(err)
	}
	bomb := wholes["gzip"](bytes.Repeat([]byte("a"), 2000))
	err := m.open("b.gz", bytes.NewReader(bomb))
	var input *fault.Input
	if !errors.As(err, &input) || input.Hint != unpackIt {
		t.Errorf("%v: expected a refusal", err)
	}
}

// TestCheckpointIsNoArchive: PyTorch's checkpoints are zips, but without logs.
func TestCheckpointIsNoArchive(t *testing.T) {
	source, err := Read("model.pt", bytes.NewReader(zipOf(t, file{"archive/data.pkl", "\x80\x02}."})))
	if err != nil || source.Kind != Binary {
		t.Errorf("%+v, %v: expected a binary file", source, err)
	}
}

// FuzzArchive: no archive makes the reader panic, and every name stays below the archive.
func FuzzArchive(f *testing.F) {
	files := []file{{"../run/train.log", refusedOnGPU}, {"a.json", `{"zero_optimization": {"stage": 3}}`}}
	for _, seed := range [][]byte{tarOf(f, files...), zipOf(f, files...), wholes["gzip"](tarOf(f, files...))} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, archive []byte) {
		sources, _, err := membersOf(archive)
		for _, s := range sources {
			acts := strings.ContainsFunc(s.Name, func(r rune) bool { return r < ' ' })
			if !strings.HasPrefix(s.Name, "bundle/") || acts {
				t.Errorf("%q is no name below the archive", s.Name)
			}
		}
		var input *fault.Input
		if err != nil && !errors.As(err, &input) && err.Error() != "this is no archive" {
			t.Errorf("%v is no error of input", err)
		}
	})
}
