// Command image writes an OCI image of one static program, without a daemon and without a base image.
package main

import (
	"archive/tar"
	"bytes"
	"flag"
	"io"
	"log"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	out := flag.String("out", "", "folder of the image, in OCI's layout")
	version := flag.String("version", "", "version of the program")
	notices := flag.String("notices", "", "file with the licenses of what the program contains")
	flag.Parse()
	index := v1.ImageIndex(empty.Index)
	for _, argument := range flag.Args() { // ARCHITECTURE=PROGRAM
		architecture, program, _ := strings.Cut(argument, "=")
		image, err := imageOf(program, *notices, architecture, *version)
		if err != nil {
			log.Fatal(err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "linux", Architecture: architecture},
		}})
	}
	if _, err := layout.Write(*out, index); err != nil {
		log.Fatal(err)
	}
}

func imageOf(program, notices, architecture, version string) (v1.Image, error) {
	files, err := archive(program, notices)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), layer)
	if err != nil {
		return nil, err
	}
	return mutate.ConfigFile(mutate.ConfigMediaType(image, types.OCIConfigJSON), configOf(image, architecture, version))
}

func configOf(image v1.Image, architecture, version string) *v1.ConfigFile {
	made, err := image.ConfigFile()
	if err != nil {
		log.Fatal(err)
	}
	config := made.DeepCopy()
	config.OS, config.Architecture = "linux", architecture
	config.Config = v1.Config{
		Entrypoint: []string{"/usr/bin/plimsoll"}, User: "65532:65532", Env: []string{"PATH=/usr/bin", "HOME=/tmp"},
		Labels: map[string]string{
			"org.opencontainers.image.title": "plimsoll", "org.opencontainers.image.version": version,
			"org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
	return config
}

// archive returns the files of the image. All times are zero, so the same program makes the same image.
func archive(program, notices string) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, folder := range []string{"usr", "usr/bin", "usr/share", "usr/share/doc", "usr/share/doc/plimsoll", "tmp"} {
		mode := int64(0o755)
		if folder == "tmp" {
			mode = 0o1777
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: folder + "/", Mode: mode}); err != nil {
			return nil, err
		}
	}
	if err := add(w, program, "usr/bin/plimsoll", 0o755); err != nil {
		return nil, err
	}
	if err := add(w, notices, "usr/share/doc/plimsoll/NOTICES.txt", 0o644); err != nil {
		return nil, err
	}
	err := w.Close() // writes the end of the archive
	return b.Bytes(), err
}

// add writes a file of this host into an archive.
func add(w *tar.Writer, file, name string, mode int64) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(text))}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}
