// Command provenance writes what a release was made from: an in-toto statement with SLSA's provenance of version 1.
//
//	provenance -version V -commit HASH -builder URI FOLDER
//
// The subjects are the files of the folder, with their SHA-256. The statement goes to stdout.
package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

type digest map[string]string

type subject struct {
	Name   string `json:"name"`
	Digest digest `json:"digest"`
}

type material struct {
	URI    string `json:"uri"`
	Digest digest `json:"digest"`
}

// statement is https://in-toto.io/Statement/v1 with https://slsa.dev/provenance/v1.
type statement struct {
	Type          string    `json:"_type"`
	Subject       []subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     predicate `json:"predicate"`
}

type predicate struct {
	BuildDefinition struct {
		BuildType            string            `json:"buildType"`
		ExternalParameters   map[string]string `json:"externalParameters"`
		ResolvedDependencies []material        `json:"resolvedDependencies"`
	} `json:"buildDefinition"`
	RunDetails struct {
		Builder struct {
			ID string `json:"id"`
		} `json:"builder"`
	} `json:"runDetails"`
}

func main() {
	version := flag.String("version", "", "the `version` of the release")
	commit := flag.String("commit", "", "`hash` of the commit")
	builder := flag.String("builder", "", "`URI` of who runs the build")
	flag.Parse()
	if *version == "" || *commit == "" || *builder == "" || flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	if err := write(os.Stdout, flag.Arg(0), *version, *commit, *builder); err != nil {
		fmt.Fprintln(os.Stderr, "provenance:", err)
		os.Exit(1)
	}
}

func write(to io.Writer, folder, version, commit, builder string) error {
	s := statement{Type: "https://in-toto.io/Statement/v1", PredicateType: "https://slsa.dev/provenance/v1"}
	files, err := os.ReadDir(folder) // in the order of their names
	if err != nil {
		return err
	}
	for _, file := range files {
		if !file.Type().IsRegular() {
			continue
		}
		sum, err := sumOf(filepath.Join(folder, file.Name()))
		if err != nil {
			return err
		}
		s.Subject = append(s.Subject, subject{file.Name(), digest{"sha256": sum}})
	}
	if len(s.Subject) == 0 {
		return fmt.Errorf("%s has no files: make packages writes them", folder)
	}
	d := &s.Predicate.BuildDefinition
	d.BuildType = "make packages"
	d.ExternalParameters = map[string]string{"version": version, "go": runtime.Version()}
	d.ResolvedDependencies = []material{{"git+commit:" + commit, digest{"gitCommit": commit}}}
	s.Predicate.RunDetails.Builder.ID = builder
	encoder := json.NewEncoder(to)
	encoder.SetIndent("", "  ")
	return encoder.Encode(s)
}

func sumOf(name string) (string, error) {
	file, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer file.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, file); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}
