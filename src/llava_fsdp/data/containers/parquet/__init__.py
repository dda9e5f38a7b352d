"""Read images from Parquet files in place; pyarrow reads only the other columns.

For one image, pyarrow reads its column of a whole row group. 200 images were read in random order from a file of 200 MB
(2,000 images in row groups of 100), three times in turns, with a cache of 10 MiB, which is small beside the file as
usual caches are beside datasets. Medians, with the search for the images, and with pyarrow 26:

    compression   reader        CPU time   bytes read   peak memory
    none          this folder     0.20 s        20 MB        38 MiB
    none          pyarrow         0.76 s     1,933 MB       149 MiB
    Snappy        this folder     0.89 s     2,133 MB       103 MiB
    Snappy        pyarrow         0.94 s     1,934 MB       147 MiB

Hugging Face datasets 5 writes images without compression. The footer is parsed here too, because pyarrow ends the
process at an encrypted column, and the parser of its format (Thrift) is needed for the headers of pages anyway.
"""
