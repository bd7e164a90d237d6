package evidence

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"path"

	"github.com/klauspost/compress/zstd"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/safe"
)

// Archive is the format of a file with files of its own.
type Archive string

// The formats of archives.
const (
	NoArchive Archive = ""
	Tar       Archive = "tar"
	Zip       Archive = "zip"
)

const (
	// mostMembers is the limit of an archive's files.
	mostMembers = 10_000
	// largestDirectory is how many bytes of a zip are read to list its files. A list has ten times that in memory.
	largestDirectory = 8 << 20
	// longestMemberName is how much of a file's name in an archive is shown, in bytes.
	longestMemberName = 200
)

// unpackIt is what a user can do about an archive that is refused.
const unpackIt = "unpack it, and name the logs or the folder with them"

// archiveOf returns the format of an archive by its head. PyTorch's checkpoints are zips as well, but have no logs.
func archiveOf(head []byte) Archive {
	const magicOfTar, startOfName = 257, 30
	switch {
	case len(head) > magicOfTar && bytes.HasPrefix(head[magicOfTar:], []byte("ustar")):
		return Tar
	case bytes.HasPrefix(head, []byte("PK\x05\x06")): // it has no files
		return Zip
	case len(head) <= startOfName || !bytes.HasPrefix(head, []byte("PK\x03\x04")):
		return NoArchive
	}
	name := head[startOfName:]
	name = name[:min(len(name), int(binary.LittleEndian.Uint16(head[26:])))]
	if path.Base(string(name)) == "data.pkl" {
		return NoArchive
	}
	return Zip
}

// members goes through the files of an archive. It writes nothing, so the names of the files cannot do harm.
type members struct {
	archive string // its name
	count   int
	limit   limit // of the texts of all files
	each    func(*Text) error
}

func newMembers(archive string, each func(*Text) error) *members {
	return &members{archive: archive, each: each, limit: limit{longestText, unpackIt}}
}

// open opens a file of the archive and passes it on. A file without content is left out, as launchers make a log for
// every stream.
func (m *members) open(name string, from io.Reader) error {
	if m.count++; m.count > mostMembers {
		return fault.File(m.archive).Inputf("the archive has more than %d files, the limit", mostMembers).
			WithHint(unpackIt)
	}
	text := &Text{source: &Source{Name: m.archive + "/" + memberName(name)}, limit: &m.limit}
	if err := text.open(text.bounded(from)); err != nil {
		return err
	}
	if _, err := text.Peek(1); errors.Is(err, io.EOF) {
		return nil
	}
	return m.each(text)
}

// memberName makes the name of a file in an archive safe to show: a short path below the archive. No file is opened
// by it.
func memberName(name string) string {
	name = path.Clean("/" + name)[1:]
	if len(name) > longestMemberName {
		name = "..." + name[len(name)-longestMemberName:]
	}
	return safe.Text(name)
}

// TarMembers calls each for every regular file of a tar archive that has content. It reports whether the archive is
// damaged or cut: the rest of its files is missing. Errors are *fault.Input or those of each.
func (t *Text) TarMembers(each func(*Text) error) (cut bool, err error) {
	t.limit.hint = unpackIt
	m := newMembers(t.Name(), each)
	from := tar.NewReader(t.Reader)
	for {
		header, err := from.Next()
		var refused *fault.Input
		switch {
		case errors.Is(err, io.EOF):
			return t.source.Cut, nil
		case errors.As(err, &refused):
			return false, err
		case err != nil:
			return true, nil
		case header.Typeflag != tar.TypeReg:
			continue
		}
		if err := m.open(header.Name, from); err != nil {
			return false, err
		}
	}
}

// ZipMembers calls each for every regular file of a zip archive that has content. Errors are *fault.Input or those of
// each.
func ZipMembers(name string, from io.ReaderAt, size int64, each func(*Text) error) error {
	directory := &directoryReader{from: from, left: largestDirectory}
	opened, err := zip.NewReader(directory, size)
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) {
		return &fault.Input{Where: fault.File(name), What: "the zip archive cannot be read", Err: err, Hint: unpackIt}
	}
	directory.opened = true
	opened.RegisterDecompressor(zstd.ZipMethodWinZip, zstd.ZipDecompressor(zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(largestWindow)))
	m := newMembers(name, each)
	for _, file := range opened.File {
		if !file.Mode().IsRegular() {
			continue
		}
		if err := m.openZipped(file); err != nil {
			return err
		}
	}
	return nil
}

func (m *members) openZipped(file *zip.File) error {
	at := fault.File(m.archive + "/" + memberName(file.Name))
	const encrypted = 1 // in the flags of the format
	if file.Flags&encrypted != 0 {
		return at.Inputf("the file is encrypted").WithHint(unpackIt)
	}
	from, err := file.Open()
	if err != nil {
		return &fault.Input{Where: at, What: "the file cannot be read", Err: err, Hint: unpackIt}
	}
	defer from.Close()
	return m.open(file.Name, from)
}

// directoryReader bounds what is read of a zip until its directory is complete.
type directoryReader struct {
	from   io.ReaderAt
	left   int64
	opened bool
}

var errDirectory = errors.New("the list of its files is too long")

func (d *directoryReader) ReadAt(to []byte, at int64) (int, error) {
	n, err := d.from.ReadAt(to, at)
	if d.opened {
		return n, err
	}
	if d.left -= int64(n); d.left < 0 {
		return 0, errDirectory
	}
	return n, err
}
