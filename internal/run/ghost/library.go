//go:build linux

package ghost

import (
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"plimsoll/internal/base/fault"
)

// The library that stands in for CUDA, in C, and the Python code that a program runs under.
//
//go:embed library/*.c library/*.h
var source embed.FS

//go:embed stage/plimsoll_stage/*.py
var stage embed.FS

// LibraryVariable names a library that was built before.
const LibraryVariable = "PLIMSOLL_GHOST"

// libraryName is the name of the library beside the program, and in the cache.
const libraryName = "libplimsoll_ghost.so"

// library returns the path of the library that stands in for CUDA: the one that the environment names, the one that was
// installed beside the program, or one that a C compiler makes of the source, once for each release.
func library(ctx context.Context) (string, error) {
	if named := os.Getenv(LibraryVariable); named != "" {
		if _, err := os.Stat(named); err != nil {
			return "", fault.Inputf("%s is %s, and there is no such file", LibraryVariable, named)
		}
		return named, nil
	}
	if program, err := os.Executable(); err == nil {
		for _, folder := range []string{".", "../lib/plimsoll"} {
			path := filepath.Join(filepath.Dir(program), folder, libraryName)
			if _, err := os.Stat(path); err == nil {
				return path, nil
			}
		}
	}
	return build(ctx)
}

// build compiles the library, unless that was done before.
func build(ctx context.Context) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	sum, err := sourceSum()
	if err != nil {
		return "", err
	}
	folder := filepath.Join(cache, "plimsoll", "ghost-"+sum)
	path := filepath.Join(folder, libraryName)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	compiler := compilerOf()
	if compiler == "" {
		return "", fault.Inputf("a program plans itself with a library that stands in for CUDA, which is not here, " +
			"and there is no C compiler to make it").
			WithHint("install a C compiler (cc), or a package of Plimsoll that has " + libraryName + "; or set " +
				LibraryVariable + " to its path")
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o700); err != nil {
		return "", err
	}
	if err := writeTree(source, "library", folder); err != nil {
		return "", err
	}
	made := filepath.Join(folder, fmt.Sprintf("made-%d.so", os.Getpid()))
	command := exec.CommandContext(ctx, compiler, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-o", made,
		"memory.c", "host.c", "events.c", "runtime.c", "driver.c", "libraries.c", "recurrent.c", "solvers.c",
		"silent.c", "unmodelled.c", "-ldl", "-lpthread")
	command.Dir = folder
	if said, err := command.CombinedOutput(); err != nil {
		return "", errors.Join(fmt.Errorf("%s cannot make the library that stands in for CUDA: %w\n%s", compiler, err,
			strings.TrimSpace(string(said))), os.Remove(made))
	}
	return path, os.Rename(made, path) // another process may have made it, too
}

// compilerOf returns a C compiler, or "".
func compilerOf() string {
	for _, name := range []string{os.Getenv("CC"), "cc", "gcc", "clang"} {
		if name == "" {
			continue
		}
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// sourceSum tells this library from others.
func sourceSum() (string, error) {
	sum := sha256.New()
	fmt.Fprintln(sum, runtime.GOARCH)
	err := fs.WalkDir(source, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := source.ReadFile(path)
		fmt.Fprintln(sum, path, len(text))
		sum.Write(text)
		return err
	})
	return fmt.Sprintf("%x", sum.Sum(nil)[:8]), err
}

// writeTree writes the files of a folder.
func writeTree(from embed.FS, root, to string) error {
	return fs.WalkDir(from, root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.MkdirAll(filepath.Join(to, name), 0o700)
		}
		text, err := from.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, name), text, 0o600)
	})
}
